"""Rules for kernel signatures that Apple's compiler enforces and clang's C++ does not know."""

from __future__ import annotations

import re
from collections import Counter

from .module import (
    BUILTINS,
    MAX_BUFFER_INDEX,
    MAX_THREADGROUP_INDEX,
    Attribute,
    KernelFunction,
    Module,
    Parameter,
)

_KNOWN = frozenset(("buffer", "threadgroup", "function_constant", *BUILTINS))


def number_implicit_buffers(module: Module) -> None:
    """Give parameters without a binding attribute the next buffer index, as Apple's compiler does."""
    for kernel in module.kernels.values():
        following = 0
        for parameter in kernel.parameters:
            explicit = parameter.attribute("buffer")
            if explicit is None and parameter.attribute("threadgroup") is None and parameter.builtin is None:
                explicit = Attribute("buffer", str(following))
                parameter.attributes.append(explicit)
            if explicit is not None and (explicit.argument or "").isdigit():
                following = max(following, int(explicit.argument or 0) + 1)


def check_signatures(module: Module) -> None:
    """Append a message to `module.errors` for each broken rule."""
    for kernel in module.kernels.values():
        for message in _kernel_errors(kernel):
            module.errors.append(f"{kernel.where}: error: kernel {kernel.name}: {message}")
    for instantiation in module.instantiations:
        if instantiation.function not in module.kernels:
            module.errors.append(
                f"{instantiation.where}: error: {instantiation.host_name} instantiates "
                f"'{instantiation.function}', which is not a kernel of this file"
            )
    names = Counter(instantiation.host_name for instantiation in module.instantiations)
    for name, count in names.items():
        if count > 1:
            where = next(i.where for i in module.instantiations if i.host_name == name)
            module.errors.append(f"{where}: error: the library has {count} kernels named '{name}'")


def _kernel_errors(kernel: KernelFunction) -> list[str]:
    errors: list[str] = []
    bindings = Counter(
        (a.name, a.argument)
        for p in kernel.parameters
        for a in p.attributes
        if a.name in ("buffer", "threadgroup")
    )
    errors += [f"[[{name}({arg})]] is used {n} times" for (name, arg), n in bindings.items() if n > 1]
    if kernel.max_threads == "32":
        # Known to be miscompiled: rows of simdgroup matrix tiles get lost.
        errors.append("max_total_threads_per_threadgroup(32): leave it out for kernels of one simdgroup")
    for parameter in kernel.parameters:
        errors += _parameter_errors(parameter)
    widths = {
        _vector_width(p.type) for p in kernel.parameters if p.builtin is not None and BUILTINS[p.builtin]
    }
    if len(widths) > 1:
        errors.append(
            "position and size attributes must all have the same number of components, "
            f"found {sorted(widths)}"
        )
    return errors


def _vector_width(type_text: str) -> int:
    match = re.search(r"(?:uint|ushort)([23])?\b", type_text)
    return int(match.group(1)) if match and match.group(1) else 1


def _parameter_errors(parameter: Parameter) -> list[str]:
    text, errors = parameter.declaration, []
    errors += [
        f"unknown attribute [[{a.name}]] on '{text}'" for a in parameter.attributes if a.name not in _KNOWN
    ]
    binding = parameter.attribute("buffer") or parameter.attribute("threadgroup")
    if binding is None and parameter.builtin is None:
        errors.append(f"parameter '{text}' has no [[...]] attribute")
    if binding is not None:
        limit = MAX_BUFFER_INDEX if binding.name == "buffer" else MAX_THREADGROUP_INDEX
        argument = binding.argument or ""
        if argument.isdigit() and int(argument) > limit:
            errors.append(f"[[{binding.name}({argument})]] on '{text}': the highest index is {limit}")
        if not parameter.is_pointer:
            errors.append(f"[[{binding.name}]] parameter '{text}' must be a pointer or reference")
    if parameter.is_pointer and parameter.address_space in (None, "thread"):
        errors.append(f"parameter '{text}' needs an address space (device, constant or threadgroup)")
    if parameter.builtin is not None:
        scalar = re.sub(r"\bconst\b", "", parameter.type).strip()
        if not re.fullmatch(r"(?:metal::)?(?:uint|ushort|uint32_t|uint16_t)[23]?", scalar):
            errors.append(f"type '{scalar}' is not valid for attribute [[{parameter.builtin}]]")
        elif not BUILTINS[parameter.builtin] and _vector_width(scalar) != 1:
            errors.append(f"[[{parameter.builtin}]] is a scalar, '{text}' is a vector")
    return errors
