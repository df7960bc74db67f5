"""``lily tokens``: the tokens of a text, or the text of tokens."""

from __future__ import annotations

import argparse
import json

from lily_py.checkpoint.files import DESCRIPTION_PATTERNS, resolve_folder
from lily_py.cli.terminal import read_text
from lily_py.cli.usage import UsageError
from lily_py.errors import InvalidArgumentError
from lily_py.text import Tokenizer


def run(options: argparse.Namespace) -> int:
    """Print the tokens and return the exit status."""
    text = read_text(options.text)
    if text is None:
        raise UsageError("no TEXT: give one in quotes, or pipe it in")
    folder = resolve_folder(options.model, revision=options.revision, patterns=DESCRIPTION_PATTERNS)
    tokenizer = Tokenizer.from_folder(folder)
    if options.ids:
        ids = _read_ids(text, tokenizer.vocab_size)
        text = tokenizer.decode(ids, skip_special=False)
    else:
        ids = tokenizer.encode(text, special_tokens=options.special)
    pieces = [_piece(tokenizer.token_bytes(token)) for token in ids]
    if options.json:
        print(
            json.dumps(
                {"count": len(ids), "ids": ids, "pieces": [str(piece) for piece in pieces], "text": text},
                ensure_ascii=False,
            )
        )
        return 0
    if options.ids:
        print(text)
        return 0
    width = len(str(max(ids, default=0)))
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>{width}}  {piece!r}")
    print(f"{len(ids)} tokens")
    return 0


def _piece(content: bytes) -> str | bytes:
    """Return a token's text; its bytes if they are only part of a character."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content


def _read_ids(text: str, vocabulary: int) -> list[int]:
    """Return ids separated by spaces or commas, in brackets or not."""
    ids = []
    for word in text.strip().strip("[]").replace(",", " ").split():
        if not (word.isascii() and word.isdigit()):
            raise InvalidArgumentError(f"--ids takes token ids such as '12 7 300', got {word!r}")
        token = int(word[:20])
        if token >= vocabulary:
            raise InvalidArgumentError(
                f"token id {word} is beyond the tokenizer, whose ids end at {vocabulary - 1}"
            )
        ids.append(token)
    return ids
