"""The two C++ dialects: one that runs on the simulator, one that only type-checks."""

from __future__ import annotations

import re

from .lexer import TokenStream
from .module import FunctionConstant, Instantiation, KernelFunction, Module, ThreadgroupVariable


def thread_limit(kernel: KernelFunction, item: Instantiation) -> str:
    """`max_total_threads_per_threadgroup` of one instantiation, as an expression without its parameters."""
    limit = kernel.max_threads or "1024"
    if kernel.template_parameters is None or "<" not in item.expression:
        return limit
    stream = TokenStream(item.expression)
    opener = next(i for i in range(len(stream)) if stream.text(i) == "<")
    ranges = stream.split_commas(opener + 1, stream.closing_angle(opener))
    values = dict(zip(kernel.template_parameters, (stream.joined(a, b) for a, b in ranges), strict=False))
    limit = re.sub(
        r"[A-Za-z_]\w*", lambda m: f"({values[m.group()]})" if m.group() in values else m.group(), limit
    )
    # A parameter left to its default: the library's limit holds.
    return "1024" if any(name in re.findall(r"\w+", limit) for name in kernel.template_parameters) else limit


class ExecutionDialect:
    """Kernels become static functions; one object per host name registers them when the library loads."""

    rewrites_vector_construction = False

    def function_constant(self, constant: FunctionConstant) -> str:
        """A variable that the simulator sets before each dispatch of a specialised pipeline."""
        name = constant.name
        if constant.index is None:
            return (
                f"static const ::metalsim::DerivedConstant<{constant.type}> {name}"
                f"{{[] {{ return ({constant.type})({constant.expression}); }}}}"
            )
        return (
            f"static {constant.type} {name}; static ::metalsim::FunctionConstant metalsim_constant_{name}"
            f'({constant.index}, "{name}", (void*)&{name}, sizeof({constant.type}))'
        )

    def threadgroup_variable(
        self, kernel: KernelFunction, variable: ThreadgroupVariable, ordinal: int
    ) -> str:
        """A reference into the threadgroup arena; its slot registers with the kernel at load."""
        type_text = f"::metalsim::Identity<{variable.type} {variable.dims}>".replace(" >", ">")
        slot = f"::metalsim::ThreadgroupVariable<{kernel.address}, {type_text}, {ordinal}>::slot"
        return f'{type_text}& {variable.name} = {slot}.template get<{type_text}>("{variable.name}")'

    def tail(self, module: Module) -> str:
        """Registration of every kernel that the library offers."""
        lines = [f'#line 1 "{module.name}.registration"']
        for number, item in enumerate(module.instantiations):
            kernel = module.kernels[item.function]
            arguments = [
                f"&{item.expression}",
                *(self._binding(kernel, i) for i in range(len(kernel.parameters))),
            ]
            limit = thread_limit(kernel, item)
            lines.append(
                f"static ::metalsim::KernelRegistration<{', '.join(arguments)}> "
                f'metalsim_kernel_{number}("{item.host_name}", {limit});'
            )
        return "\n".join(lines)

    @staticmethod
    def _binding(kernel: KernelFunction, index: int) -> str:
        parameter = kernel.parameters[index]
        if parameter.builtin is not None:
            return f"::metalsim::binding::{parameter.builtin}"
        buffer = parameter.attribute("buffer")
        if buffer is not None:
            optional = "true" if parameter.attribute("function_constant") else "false"
            return f"::metalsim::binding::buffer<{buffer.argument}, {optional}>"
        threadgroup = parameter.attribute("threadgroup")
        return f"::metalsim::binding::threadgroup_memory<{threadgroup.argument if threadgroup else 0}>"


class CheckDialect:
    """Text for clang's C++ for OpenCL mode, whose address spaces are Metal's."""

    rewrites_vector_construction = True

    def function_constant(self, constant: FunctionConstant) -> str:
        """Function constants are not constant expressions; an external constant has that property."""
        return f"extern constant {constant.type} {constant.name}"

    def threadgroup_variable(
        self, kernel: KernelFunction, variable: ThreadgroupVariable, ordinal: int
    ) -> str:
        """OpenCL refuses `local` arrays of dependent size; a reference has the same type."""
        type_text = f"::metal::Identity<{variable.type} {variable.dims}>".replace(" >", ">")
        return f"threadgroup {type_text}& {variable.name} = ::metal::threadgroup_reference<{type_text}>()"

    def tail(self, module: Module) -> str:
        """Instantiate every template kernel, so that its body is checked with its real types."""
        lines = [f'#line 1 "{module.name}.instantiation"']
        for number, item in enumerate(module.instantiations):
            if "<" in item.expression:
                lines.append(self._instantiate(number, item))
        return "\n".join(lines)

    @staticmethod
    def _instantiate(number: int, item: Instantiation) -> str:
        return (
            f"using metalsim_type_{number} = decltype({item.expression}); "
            f"template decltype({item.expression}) {item.expression};"
        )


def execution_source(module: Module, header: str) -> str:
    """Complete C++ file.

    The shim's library is msl::metal: inside namespace msl, `using namespace metal` makes its names and the
    file's own overload each other, as in Metal, while the C library's are hidden behind them.
    """
    return f'#include "{header}"\nnamespace msl {{\n{module.body}\n{ExecutionDialect().tail(module)}\n}}\n'


def check_source(module: Module, header: str) -> str:
    """Complete C++ for OpenCL file."""
    return f'#include "{header}"\n{module.body}\n{CheckDialect().tail(module)}\n'
