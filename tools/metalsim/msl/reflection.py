"""Kernel reflection: what each kernel of a file binds, as plain data for JSON.

The host's bindings are compared with this in tests, so that a wrong index or type is found without a GPU.
"""

from __future__ import annotations

from typing import Any

from .emit import thread_limit
from .module import Instantiation, KernelFunction, Module, Parameter


def _argument(parameter: Parameter) -> dict[str, Any]:
    described: dict[str, Any] = {"name": parameter.name, "type": parameter.type}
    if parameter.builtin is not None:
        return {**described, "kind": "builtin", "builtin": parameter.builtin}
    buffer, threadgroup = parameter.attribute("buffer"), parameter.attribute("threadgroup")
    binding = buffer or threadgroup
    index = binding.argument if binding is not None and binding.argument is not None else ""
    described["kind"] = "threadgroup" if threadgroup is not None else "buffer"
    described["index"] = int(index) if index.isdigit() else index
    described["address_space"] = parameter.address_space
    described["access"] = "read" if _is_read_only(parameter) else "read_write"
    described["reference"] = "&" in parameter.declaration
    condition = parameter.attribute("function_constant")
    if condition is not None:
        described["function_constant"] = condition.argument
    return described


def _is_read_only(parameter: Parameter) -> bool:
    return parameter.address_space == "constant" or "const" in parameter.type.replace("*", " ").split()


def _kernel(item: Instantiation, kernel: KernelFunction) -> dict[str, Any]:
    limit = thread_limit(kernel, item) if kernel.max_threads else None
    return {
        "name": item.host_name,
        "expression": item.expression,
        "source": kernel.where,
        "max_total_threads_per_threadgroup": int(limit) if limit and limit.isdigit() else limit,
        "arguments": [_argument(parameter) for parameter in kernel.parameters],
        "threadgroup_variables": [
            {"name": v.name, "type": v.type, "dims": v.dims} for v in kernel.threadgroup_variables
        ],
    }


def reflect(module: Module) -> dict[str, Any]:
    """`{"file", "kernels": [...], "function_constants": [...]}`."""
    kernels = [
        _kernel(item, module.kernels[item.function])
        for item in module.instantiations
        if item.function in module.kernels
    ]
    constants = [
        {"name": c.name, "type": c.type, "index": int(c.index) if c.index.isdigit() else c.index}
        for c in module.constants
        if c.index is not None
    ]
    return {"file": module.name, "kernels": kernels, "function_constants": constants}
