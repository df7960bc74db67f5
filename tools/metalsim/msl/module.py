"""What a Metal source file declares: kernels, their parameters, instantiations and constants."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")

# Attributes of kernel parameters whose value the GPU supplies; the flag says whether the value is a
# position or size (scalar or vector; one width per kernel) or an index (always scalar).
BUILTINS: dict[str, bool] = {
    "thread_position_in_grid": True,
    "thread_position_in_threadgroup": True,
    "threadgroup_position_in_grid": True,
    "threads_per_threadgroup": True,
    "threads_per_grid": True,
    "threadgroups_per_grid": True,
    "dispatch_threads_per_threadgroup": True,
    "thread_index_in_threadgroup": False,
    "thread_index_in_simdgroup": False,
    "simdgroup_index_in_threadgroup": False,
    "simdgroups_per_threadgroup": False,
    "threads_per_simdgroup": False,
    "thread_execution_width": False,
    "thread_index_in_quadgroup": False,
    "quadgroup_index_in_threadgroup": False,
    "quadgroups_per_threadgroup": False,
}

MAX_BUFFER_INDEX = 30
MAX_THREADGROUP_INDEX = 30


@dataclass(frozen=True)
class Attribute:
    """One `[[name(argument)]]`."""

    name: str
    argument: str | None = None


@dataclass
class Parameter:
    """A kernel parameter: declaration text without attributes, and the attributes."""

    declaration: str
    attributes: list[Attribute]

    @property
    def name(self) -> str:
        """The identifier, the last word of the declaration."""
        words = re.findall(r"[A-Za-z_]\w*", self.declaration)
        return words[-1] if words else ""

    @property
    def type(self) -> str:
        """The declaration without the identifier."""
        return re.sub(rf"\b{re.escape(self.name)}\s*$", "", self.declaration).strip()

    @property
    def address_space(self) -> str | None:
        """device, constant, threadgroup or thread, if the declaration names one."""
        words = re.findall(r"\w+", self.declaration)
        return next((space for space in ADDRESS_SPACES if space in words), None)

    @property
    def is_pointer(self) -> bool:
        """Whether the parameter is a pointer or a reference."""
        return "*" in self.declaration or "&" in self.declaration

    def attribute(self, name: str) -> Attribute | None:
        """The attribute with this name."""
        return next((a for a in self.attributes if a.name == name), None)

    @property
    def builtin(self) -> str | None:
        """Name of the GPU-supplied value, if it is one."""
        return next((a.name for a in self.attributes if a.name in BUILTINS), None)


@dataclass
class ThreadgroupVariable:
    """A `threadgroup T name[dims];` of a kernel body."""

    name: str
    type: str
    dims: str


@dataclass
class KernelFunction:
    """A kernel definition; `template_parameters` is None for a plain function."""

    name: str
    where: str
    parameters: list[Parameter]
    template_parameters: list[str] | None = None
    max_threads: str | None = None
    threadgroup_variables: list[ThreadgroupVariable] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Expression for the function's address inside its own body."""
        if self.template_parameters is None:
            return f"&{self.name}"
        return f"&{self.name}<{', '.join(self.template_parameters)}>"


@dataclass
class Instantiation:
    """A kernel that the library offers: host name, C++ expression, name of its definition."""

    host_name: str
    expression: str
    function: str
    where: str


@dataclass
class FunctionConstant:
    """`constant T name [[function_constant(index)]];`, or without index one that is computed from others."""

    name: str
    type: str
    index: str | None
    expression: str = ""


@dataclass
class Module:
    """A rewritten file. `errors` are complete messages with position."""

    name: str
    body: str = ""
    kernels: dict[str, KernelFunction] = field(default_factory=dict)
    instantiations: list[Instantiation] = field(default_factory=list)
    constants: list[FunctionConstant] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
