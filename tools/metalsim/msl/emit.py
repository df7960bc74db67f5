"""The two C++ dialects: one that runs on the simulator, one that only type-checks."""

from __future__ import annotations

import re

from .module import FunctionConstant, Instantiation, KernelFunction, Module, ThreadgroupVariable


def identifier(text: str) -> str:
    """`text` with everything that a C++ identifier can't hold replaced."""
    return re.sub(r"\W", "_", text)


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
            limit = kernel.max_threads or "1024"
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


def execution_source(module: Module, header: str, isolate: bool = True) -> str:
    """Complete C++ file; `isolate` puts it in a namespace of its own."""
    body = f"{module.body}\n{ExecutionDialect().tail(module)}\n"
    if isolate:
        body = f"namespace msl_{identifier(module.name)} {{\n{body}}}\n"
    return f'#include "{header}"\n{body}'


def check_source(module: Module, header: str) -> str:
    """Complete C++ for OpenCL file."""
    return f'#include "{header}"\n{module.body}\n{CheckDialect().tail(module)}\n'
