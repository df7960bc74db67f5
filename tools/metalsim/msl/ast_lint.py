"""Rules of Metal that clang's C++ for OpenCL mode lets pass, found in its JSON syntax tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Node = dict[str, Any]

_SPACE_ADVICE = "pointer or reference needs an address space (write 'thread')"
_CASTS = frozenset(
    (
        "CStyleCastExpr",
        "CXXStaticCastExpr",
        "CXXReinterpretCastExpr",
        "CXXFunctionalCastExpr",
        "CXXConstCastExpr",
    )
)
_VARIABLES = frozenset(("ParmVarDecl", "VarDecl", "FieldDecl"))
_FUNCTIONS = frozenset(("FunctionDecl", "CXXMethodDecl"))
_METHODS = frozenset(("CXXMethodDecl", "CXXConstructorDecl"))
_ARITHMETIC = frozenset(("+", "-", "*", "/", "+=", "-=", "*=", "/="))


def _type(node: Node) -> str:
    return str(node.get("type", {}).get("qualType", ""))


class Lint:
    """One walk over the tree. The JSON names a file and a line only where they change."""

    def __init__(self, language: tuple[int, int], shim_files: tuple[str, ...]) -> None:
        self.language, self.shim_files = language, shim_files
        self.file, self.line = "", 0
        self.shown_file, self.shown_line = "", 0
        self.messages: list[str] = []
        self.seen: set[tuple[str, int, str]] = set()
        self.calls: dict[str, set[str]] = {}
        self.names: dict[str, str] = {}
        self.library: set[str] = set()

    def run(self, tree: Node) -> list[str]:
        """All messages, as `file:line: error: text`."""
        # An explicit stack: expressions nest deeper than Python's recursion goes.
        stack: list[tuple[Node, str | None, bool, str]] = [(tree, None, False, "")]
        while stack:
            node, function, implicit, parent = stack.pop()
            function, implicit = self._visit(node, function, implicit, parent)
            for child in reversed(node.get("inner", [])):
                stack.append((child, function, implicit, str(node.get("kind"))))
        self.messages += [
            f"error: recursion through '{self.names[identity]}' (not allowed in Metal)"
            for identity in self._recursive()
        ]
        return self.messages

    def _move(self, location: Node | None) -> None:
        if not isinstance(location, dict):
            return
        for part in ("spellingLoc", "expansionLoc"):
            self._move(location.get(part))
        if "file" in location:
            self.file = location["file"]
        if "line" in location:
            self.line = location["line"]
            self.shown_line = location.get("presumedLine", self.line)
        if "presumedFile" in location:
            self.shown_file = location["presumedFile"]

    def _report(self, key: str, message: str) -> None:
        if (self.file, self.line, key) in self.seen:
            return
        self.seen.add((self.file, self.line, key))
        self.messages.append(f"{self.shown_file or self.file}:{self.shown_line}: error: {message}")

    def _visit(
        self, node: Node, function: str | None, implicit: bool, parent: str
    ) -> tuple[str | None, bool]:
        implicit = implicit or bool(node.get("isImplicit"))
        kind = node.get("kind")
        self._move(node.get("loc"))
        here = (self.file, self.line, self.shown_file, self.shown_line)
        extent = node.get("range", {})
        self._move(extent.get("begin"))
        if not here[0]:
            here = (self.file, self.line, self.shown_file, self.shown_line)
        self._move(extent.get("end"))
        after = (self.file, self.line, self.shown_file, self.shown_line)
        self.file, self.line, self.shown_file, self.shown_line = here
        if kind in _FUNCTIONS:
            function = node.get("id")
        if self.file and self.file != "<built-in>" and not self.file.endswith(self.shim_files):
            if not implicit:
                self._check_address_spaces(node)
                self._check_methods(node)
            self._check_bfloat(node, parent)
            if kind == "LambdaExpr" and self.language < (3, 2):
                self._report("lambda", "lambda expressions are not supported in Metal before 3.2")
        elif kind in _FUNCTIONS and "name" in node:
            self.library.add(node["name"])
        if kind == "DeclRefExpr" and function:
            target = node.get("referencedDecl", {})
            if target.get("kind") in _FUNCTIONS:
                self.calls.setdefault(function, set()).add(target["id"])
                self.names[target["id"]] = target.get("name", "")
        self.file, self.line, self.shown_file, self.shown_line = after
        return function, implicit

    def _check_address_spaces(self, node: Node) -> None:
        """OpenCL gives pointers without a space the generic one; Metal refuses them."""
        kind, type_text = node.get("kind"), _type(node)
        if kind in _VARIABLES and "__generic" in type_text:
            plain = type_text.replace("__generic ", "")
            self._report(str(node.get("name")), f"'{node.get('name')}' ({plain}): {_SPACE_ADVICE}")
        elif kind in _CASTS and "__generic" in type_text:
            self._report("cast", f"cast: {_SPACE_ADVICE}")
        elif kind in _FUNCTIONS and "__generic" in type_text.split("(")[0]:
            self._report("return", f"return type of {node.get('name')}: {_SPACE_ADVICE}")

    def _check_methods(self, node: Node) -> None:
        """Without a qualifier `this` is thread for older compilers of Apple, but generic since macOS 27."""
        if node.get("kind") not in _METHODS or node.get("storageClass") == "static":
            return
        if _type(node).endswith("__generic") and not str(node.get("name", "")).startswith("operator()"):
            self._report(
                str(node.get("name")),
                f"method '{node.get('name')}' needs an address space behind its parameters (write 'thread')",
            )

    def _check_bfloat(self, node: Node, parent: str) -> None:
        """Metal converts bfloat to float implicitly but never back, and its arithmetic gives float."""
        kind, type_text = node.get("kind"), _type(node)
        if not type_text.removeprefix("const ").startswith(("__bf16", "bfloat")):
            return
        if kind in ("BinaryOperator", "CompoundAssignOperator") and node.get("opcode") in _ARITHMETIC:
            self._report(
                "bfloat arithmetic", "arithmetic on bfloat gives float: convert the operands to float"
            )
        elif (
            kind == "ImplicitCastExpr"
            and parent not in _CASTS
            and node.get("castKind") in ("FloatingCast", "IntegralToFloating")
        ):
            self._report("bfloat conversion", "no implicit conversion to bfloat: write bfloat(...)")

    def _recursive(self) -> Iterator[str]:
        for start in self.calls:
            reached: set[str] = set()
            pending = list(self.calls[start])
            while pending:
                callee = pending.pop()
                if callee not in reached:
                    reached.add(callee)
                    pending += self.calls.get(callee, ())
            if start in reached:
                yield start
