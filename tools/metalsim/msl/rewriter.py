"""Turns preprocessed MSL into C++ text of one dialect, and collects what the file declares.

Only the constructs that plain clang can't parse are touched: `[[...]]` attributes of kernels and their
parameters, `template [[host_name("x")]] [[kernel]] ...;` instantiations, `threadgroup` variables and
function constants. Line structure is kept, so that every message names the line in the .metal file.
"""

from __future__ import annotations

import re
from typing import Protocol

from .lexer import SourceError, TokenStream
from .module import (
    Attribute,
    FunctionConstant,
    Instantiation,
    KernelFunction,
    Module,
    Parameter,
    ThreadgroupVariable,
)

_VECTOR_TYPE = re.compile(r"(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)[234]")


class Dialect(Protocol):
    """Texts that differ between the execution and the check build."""

    rewrites_vector_construction: bool

    def function_constant(self, constant: FunctionConstant) -> str:
        """Declaration that replaces `constant T name [[function_constant(n)]]`."""
        ...

    def threadgroup_variable(
        self, kernel: KernelFunction, variable: ThreadgroupVariable, ordinal: int
    ) -> str:
        """Declaration that replaces `threadgroup T name[dims]`."""
        ...


class Rewriter:
    """One pass over the tokens with a stack of scopes."""

    def __init__(self, text: str, name: str, dialect: Dialect) -> None:
        self.stream = TokenStream(text)
        self.module = Module(name)
        self.dialect = dialect
        self.scopes: list[str] = []  # "namespace", "type", "function" or "block"
        self.head: list[str] = []  # tokens of the current declaration, to classify the next "{"
        self.statement_start = True
        self.template_parameters: list[str] | None = None
        self.kernel_pending = False  # a `kernel` word or attribute was seen, its signature not yet
        self.max_threads: str | None = None
        self.declared_kernel: KernelFunction | None = None  # its body opens next
        self.kernel: KernelFunction | None = None  # the body we are in
        self.variables = 0

    def run(self) -> Module:
        """Rewrite everything; errors are collected in the module."""
        i = 0
        while i < len(self.stream):
            i = self._step(i)
        self.module.body = self.stream.render()
        return self.module

    def _error(self, index: int, message: str) -> None:
        self.module.errors.append(f"{self.stream.where(index)}: error: {message}")

    @property
    def _in_function(self) -> bool:
        return "function" in self.scopes

    def _step(self, i: int) -> int:
        stream = self.stream
        if stream.is_blank(i):
            return i + 1
        text = stream.text(i)
        if not self._in_function:
            if text == "template":
                return self._template(i)
            if text == "kernel":
                self.kernel_pending = True
                stream.erase(i, i + 1)
                return i + 1
            if self.kernel_pending and text == "(" and self._names_a_function(i):
                return self._signature(i)
            if self.statement_start and text == "constant":
                after = self._function_constant(i)
                if after is not None:
                    return after
        elif self.statement_start and text in ("threadgroup", "const"):
            after = self._threadgroup_variable(i)
            if after is not None:
                return after
        if text == "[[":
            return self._attribute(i)
        if self.dialect.rewrites_vector_construction:
            self._vector_construction(i)
        self._track_scope(i)
        return i + 1

    # ---- attributes -------------------------------------------------------------------------------

    def _attributes(self, i: int) -> tuple[list[Attribute], int]:
        """Parse `[[a(x), b]]` at `i`; returns the attributes and the index of `]]`."""
        stream, end = self.stream, i
        while stream.text(end) != "]]":
            end += 1
            if end >= len(stream):
                raise SourceError(f"{stream.where(i)}: error: unbalanced '[['")
        found: list[Attribute] = []
        j = stream.significant(i)
        while j < end:
            name, argument, k = stream.text(j), None, stream.significant(j)
            if stream.text(k) == "(":
                close = stream.closing(k, "(", ")")
                argument, k = stream.joined(k + 1, close), stream.significant(close)
            found.append(Attribute(name, argument))
            j = stream.significant(k) if stream.text(k) == "," else k
        return found, end

    def _attribute(self, i: int) -> int:
        attributes, end = self._attributes(i)
        if not self._in_function:
            for attribute in attributes:
                if attribute.name == "kernel":
                    self.kernel_pending = True
                elif attribute.name == "max_total_threads_per_threadgroup":
                    self.max_threads = attribute.argument
        self.stream.erase(i, end + 1)
        return end + 1

    # ---- templates and kernels --------------------------------------------------------------------

    def _template(self, i: int) -> int:
        opener = self.stream.significant(i)
        if self.stream.text(opener) != "<":
            return self._instantiation(i)
        close = self.stream.closing_angle(opener)
        names = []
        for begin, end in self.stream.split_commas(opener + 1, close):
            declaration = self.stream.joined(begin, end).split("=")[0].strip()
            words = re.findall(r"[A-Za-z_]\w*|\.\.\.", declaration)
            names.append(words[-1] + ("..." if "..." in words else "") if words else "")
        self.template_parameters = names
        self.statement_start = True
        return close + 1

    def _instantiation(self, i: int) -> int:
        stream, end = self.stream, i
        while stream.text(end) != ";":
            end = stream.closing(end, "(", ")") + 1 if stream.text(end) == "(" else end + 1
        j, host_name, is_kernel = stream.significant(i), None, False
        while stream.text(j) in ("[[", "kernel"):
            if stream.text(j) == "kernel":
                is_kernel, j = True, stream.significant(j)
                continue
            attributes, close = self._attributes(j)
            for attribute in attributes:
                if attribute.name == "host_name" and attribute.argument:
                    host_name = attribute.argument.strip('"')
                is_kernel = is_kernel or attribute.name == "kernel"
            stream.erase(j, close + 1)
            j = stream.significant(close)
        if is_kernel:
            opener = stream.significant(j)
            if stream.text(j) == "decltype":  # decltype(f<...>) f<...>;
                expression = stream.joined(opener + 1, stream.closing(opener, "(", ")"))
            else:  # void f<...>(parameters);
                p = opener
                while stream.text(p) != "(":
                    p = stream.closing_angle(p) + 1 if stream.text(p) == "<" else p + 1
                expression = stream.joined(opener, p)
            function = expression.split("<")[0].strip().split("::")[-1]
            where = stream.where(i)
            self.module.instantiations.append(
                Instantiation(host_name or function, expression, function, where)
            )
            stream.erase(i, end + 1)
        self.statement_start = True
        return end + 1

    def _names_a_function(self, i: int) -> bool:
        before = self.stream.significant(i, -1)
        return self.stream.kind(before) == "identifier" and self.stream.text(before) not in (
            "__attribute__",
            "decltype",
        )

    def _signature(self, i: int) -> int:
        stream = self.stream
        name = stream.text(stream.significant(i, -1))
        close = stream.closing(i, "(", ")")
        parameters = []
        for begin, end in stream.split_commas(i + 1, close):
            attributes: list[Attribute] = []
            j = begin
            while j < end:
                if stream.text(j) == "[[":
                    found, last = self._attributes(j)
                    attributes += found
                    stream.erase(j, last + 1)
                    j = last
                j += 1
            parameters.append(Parameter(stream.joined(begin, end), attributes))
        kernel = KernelFunction(name, stream.where(i), parameters, self.template_parameters, self.max_threads)
        self.module.kernels[name] = kernel
        if stream.text(stream.significant(close)) == "{":
            if kernel.template_parameters is None:
                self.module.instantiations.append(Instantiation(name, name, name, kernel.where))
            self.declared_kernel, self.kernel_pending, self.max_threads = kernel, False, None
        self.head += ["(", ")"]
        return close + 1

    # ---- variables --------------------------------------------------------------------------------

    def _declaration_end(self, i: int, stops: tuple[str, ...]) -> int:
        """Index of the first of `stops` from `i` on that doesn't stand in array bounds."""
        while i < len(self.stream) and self.stream.text(i) not in stops:
            i = self.stream.closing(i, "[", "]") + 1 if self.stream.text(i) == "[" else i + 1
        return i

    def _function_constant(self, i: int) -> int | None:
        stream = self.stream
        end = self._declaration_end(i, (";", "=", "{"))
        opener = next((j for j in range(i, end) if stream.text(j) == "[["), None)
        if opener is None:
            return self._derived_constant(i, end)
        attributes, _ = self._attributes(opener)
        index = next((a.argument for a in attributes if a.name == "function_constant"), None)
        if index is None:
            return None
        name_at = stream.significant(opener, -1)
        constant = FunctionConstant(
            stream.text(name_at), stream.joined(stream.significant(i), name_at), index
        )
        self.module.constants.append(constant)
        stream.erase(i, end)
        stream.replace(i, self.dialect.function_constant(constant))
        return end

    def _derived_constant(self, i: int, equals: int) -> int | None:
        """`constant T y = ...x...;` where x is a function constant: not known at compile time."""
        stream = self.stream
        end = self._declaration_end(equals, (";",))
        names = {stream.text(j) for j in range(equals, end) if stream.kind(j) == "identifier"}
        if stream.text(equals) != "=" or not names & {c.name for c in self.module.constants}:
            return None
        name_at = stream.significant(equals, -1)
        words = stream.joined(stream.significant(i), name_at).split()
        type_text = " ".join(word for word in words if word not in ("const", "constexpr"))
        constant = FunctionConstant(stream.text(name_at), type_text, None, stream.joined(equals + 1, end))
        self.module.constants.append(constant)
        stream.erase(i, end)
        stream.replace(i, self.dialect.function_constant(constant))
        return end

    def _threadgroup_variable(self, i: int) -> int | None:
        stream = self.stream
        end = self._declaration_end(i, (";", "=", "{", "("))
        declaration = stream.joined(i, end)
        before_dims = re.sub(r"\[.*", "", declaration)
        if "threadgroup" not in declaration.split() or re.search(r"[*&]", before_dims):
            return None
        if stream.text(end) != ";":
            if stream.text(end) in ("=", "{"):
                self._error(i, f"a threadgroup variable cannot have an initialiser: {declaration}")
            return None
        significant = [j for j in range(i, end) if not stream.is_blank(j)]
        bracket = next((j for j in significant if stream.text(j) == "["), end)
        name_at = stream.significant(bracket, -1)
        variable = ThreadgroupVariable(
            stream.text(name_at),
            " ".join(word for word in stream.joined(i, name_at).split() if word != "threadgroup"),
            stream.joined(bracket, end),
        )
        between = re.sub(r"\[[^\]]*\]", "", variable.dims)  # after `a[n]` nothing but other bounds
        if "," in re.sub(r"<.*>", "", variable.type) + between:
            self._error(i, f"declare one threadgroup variable per statement: {declaration}")
        if self.kernel is None:
            self._error(i, f"threadgroup variable '{variable.name}' declared outside a kernel function")
            stream.erase(i, end)
            return end
        self.kernel.threadgroup_variables.append(variable)
        stream.erase(i, end)
        self.variables += 1
        stream.replace(i, self.dialect.threadgroup_variable(self.kernel, variable, self.variables))
        return end

    def _vector_construction(self, i: int) -> None:
        """OpenCL reads `float4(a, b)` as a cast of a comma expression: build vectors by a function."""
        stream, text = self.stream, self.stream.text(i)
        if stream.kind(i) != "identifier":
            return
        after = stream.significant(i)
        if text == "vec" and stream.text(after) == "<":
            close = stream.closing_angle(after)
            if stream.text(stream.significant(close)) == "(":
                stream.tokens[i].text, stream.tokens[close].text = "::metal::make_vector<vec", ">>"
        elif _VECTOR_TYPE.fullmatch(text) and stream.text(after) == "(":
            stream.tokens[i].text = f"::metal::make_vector<{text}>"

    # ---- scopes -----------------------------------------------------------------------------------

    def _track_scope(self, i: int) -> None:
        text = self.stream.text(i)
        if text == "{":
            self._open_scope()
        elif text == "}":
            if self.scopes:
                scope = self.scopes.pop()
                if scope == "function":
                    self.kernel = None
                if scope in ("function", "type"):
                    self.template_parameters = None
            self.head, self.statement_start = [], True
        elif text == ";":
            if not self._in_function:
                self.template_parameters, self.kernel_pending = None, False
            self.head, self.statement_start = [], True
        else:
            self.head.append(text)
            self.statement_start = False
            if text == ":" and self.head[-2:-1] and self.head[-2] in ("public", "private", "protected"):
                self.head = []

    def _open_scope(self) -> None:
        head = self.head
        if self._in_function:
            self.scopes.append("block")
        elif "namespace" in head or (head[:1] == ["extern"] and len(head) == 2):
            self.scopes.append("namespace")
        elif any(word in ("struct", "class", "union", "enum") for word in head) and "(" not in head:
            self.scopes.append("type")
        elif "(" in head:
            self.scopes.append("function")
            self.kernel, self.declared_kernel = self.declared_kernel, None
        else:
            self.scopes.append("type")  # an initialiser list
        self.head, self.statement_start = [], True
