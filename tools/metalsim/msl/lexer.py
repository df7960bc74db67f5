"""Tokens of preprocessed MSL, with the source position that the line markers give them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\v\r]+)|(?P<newline>\n)|(?P<directive>\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)|(?P<identifier>[A-Za-z_]\w*)
    |(?P<operator>\[\[|\]\]|::|->|<<=|>>=|\+\+|--|&&|\|\||[-+*/%&|^!=<>]=|[^\s\w])""",
    re.X,
)
_LINE_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
_BLANK_KINDS = frozenset(("space", "newline", "directive"))


class SourceError(Exception):
    """MSL that the rewriter refuses; the text starts with `file:line: error:`."""


@dataclass
class Token:
    """One token; `text` may be replaced by the rewriter, position stays."""

    kind: str
    text: str
    file: str
    line: int


def _raw_tokens(text: str) -> Iterator[Token]:
    file, line = "<input>", 1
    for match in _TOKEN.finditer(text):
        kind, value = match.lastgroup or "operator", match.group()
        yield Token(kind, value, file, line)
        if kind == "newline":
            line += 1
        elif kind == "directive":
            marker = _LINE_MARKER.match(value)
            if marker:
                # The marker names the line that follows it; the newline after the marker adds one.
                line, file = int(marker.group(1)) - 1, marker.group(2)


def tokenize(text: str) -> list[Token]:
    """Split `text`; `]]` stays one token only where it closes a `[[` attribute (in `a[b[i]]` it doesn't)."""
    tokens: list[Token] = []
    open_brackets: list[str] = []
    for token in _raw_tokens(text):
        if token.text in ("[[", "["):
            open_brackets.append(token.text)
        elif token.text == "]" and open_brackets:
            open_brackets.pop()
        elif token.text == "]]":
            if open_brackets and open_brackets[-1] == "[[":
                open_brackets.pop()
            else:
                del open_brackets[-2:]
                tokens.append(Token("operator", "]", token.file, token.line))
                token = Token("operator", "]", token.file, token.line)
        tokens.append(token)
    return tokens


class TokenStream:
    """A token list with the navigation that the rewriter needs. Indices are plain list indices."""

    def __init__(self, text: str) -> None:
        self.tokens = tokenize(text)

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, index: int) -> str:
        """The token's text, or "" outside the stream."""
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def kind(self, index: int) -> str:
        """The token's kind, or "" outside the stream."""
        return self.tokens[index].kind if 0 <= index < len(self.tokens) else ""

    def where(self, index: int) -> str:
        """`file:line` of a token."""
        token = self.tokens[min(index, len(self.tokens) - 1)]
        return f"{token.file}:{token.line}"

    def is_blank(self, index: int) -> bool:
        """White space, a newline or a line marker."""
        return self.kind(index) in _BLANK_KINDS

    def significant(self, index: int, step: int = 1) -> int:
        """Index of the next token (previous for step -1) that is not blank."""
        index += step
        while 0 <= index < len(self.tokens) and self.is_blank(index):
            index += step
        return index

    def closing(self, index: int, opener: str, closer: str) -> int:
        """Index of the token that closes the `opener` at `index`."""
        depth = 0
        for i in range(index, len(self.tokens)):
            if self.tokens[i].kind != "operator":
                continue
            if self.tokens[i].text == opener:
                depth += 1
            elif self.tokens[i].text == closer:
                depth -= 1
                if depth == 0:
                    return i
        raise SourceError(f"{self.where(index)}: error: unbalanced '{opener}'")

    def closing_angle(self, index: int) -> int:
        """Index of the `>` that closes the `<` at `index`, ignoring what stands in other brackets."""
        depth = nested = 0
        for i in range(index, len(self.tokens)):
            text = self.tokens[i].text
            if text in ("(", "[", "{"):
                nested += 1
            elif text in (")", "]", "}"):
                nested -= 1
            elif nested == 0 and text == "<":
                depth += 1
            elif nested == 0 and text == ">":
                depth -= 1
                if depth == 0:
                    return i
        raise SourceError(f"{self.where(index)}: error: unbalanced '<'")

    def joined(self, begin: int, end: int) -> str:
        """Source text of a token range on one line, without line markers."""
        parts = [t.text for t in self.tokens[begin:end] if t.kind != "directive"]
        return " ".join("".join(parts).replace("\n", " ").split())

    def erase(self, begin: int, end: int) -> None:
        """Remove a token range but keep the line structure."""
        for token in self.tokens[begin:end]:
            if token.kind not in ("newline", "directive"):
                token.kind, token.text = "space", ""

    def replace(self, index: int, text: str) -> None:
        """Put `text` where token `index` is."""
        self.tokens[index].kind, self.tokens[index].text = "identifier", text

    def split_commas(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Ranges between the top-level commas of a parameter or argument list."""
        ranges: list[tuple[int, int]] = []
        start, depth = begin, 0
        for i in range(begin, end):
            text = self.tokens[i].text
            if text in ("(", "[", "{", "[[", "<"):
                depth += 1
            elif text in (")", "]", "}", "]]", ">"):
                depth -= 1
            elif text == "," and depth == 0:
                ranges.append((start, i))
                start = i + 1
        if self.joined(start, end):
            ranges.append((start, end))
        return ranges

    def render(self) -> str:
        """The whole text, as rewritten."""
        return "".join(token.text for token in self.tokens)
