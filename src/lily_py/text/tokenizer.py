"""Text to tokens and back, through the checkpoint's `tokenizer.json`.

Control tokens (``<|im_end|>``, ``<tool_call>``, …) are recognised in text only where the caller asks for it:
a rendered chat template needs it, while in a prompt that a user typed they are ordinary characters.
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import tokenizers.decoders

from lily_py.checkpoint.special_tokens import read_special_tokens
from lily_py.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from lily_py.checkpoint import Checkpoint


class Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        description: the text of a `tokenizer.json`.
        eos_token_ids: tokens that end a turn, from whatever sources the caller has.
        where: the file's path, for errors.

    Raises:
        CheckpointError: it isn't a tokenizer.
        UnsupportedModelError: its decoder isn't byte-level, so that tokens have no bytes of their own.
    """

    def __init__(
        self, description: str, eos_token_ids: Iterable[int] = (), where: str = "tokenizer.json"
    ) -> None:
        self._description = description
        self._where = where
        self._tokenizer = _load(description, where)
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise UnsupportedModelError(f"{where}: only byte-level tokenizers are supported")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._control_texts = tuple(entry.content for entry in added.values())
        tokens = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(tokens, default=-1) + 1
        """One more than the highest id that has a token; an output head may have more rows."""
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        """Tokens that end a turn."""
        self._cache: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Load the tokenizer of a checkpoint's folder; its own end token joins `eos_token_ids`.

        Raises:
            CheckpointNotFoundError: no `tokenizer.json`.
            CheckpointError: a damaged file.
        """
        path = folder / "tokenizer.json"
        try:
            description = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{path}: no such file; the checkpoint needs its tokenizer in this form "
                "(AutoTokenizer(...).save_pretrained writes it)"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: can't be read ({error})") from error
        tokenizer = cls(description, eos_token_ids, str(path))
        own = tokenizer.token_id(read_special_tokens(folder).get("eos_token"))
        if own is not None:
            tokenizer.eos_token_ids = tuple(dict.fromkeys((*tokenizer.eos_token_ids, own)))
        return tokenizer

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Load a checkpoint's tokenizer; its end tokens are those of all the checkpoint's files."""
        return cls.from_folder(checkpoint.tokenizer_folder, checkpoint.config.eos_token_ids)

    @property
    def description(self) -> str:
        """The text of its `tokenizer.json`."""
        return self._description

    def __repr__(self) -> str:
        return f"Tokenizer({self._where!r}, vocab_size={self.vocab_size})"

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text; nothing is added before or after it.

        Args:
            text: any text.
            special_tokens: recognise control tokens written in the text, as rendered templates need. Without
                it they are spelled out as ordinary characters, so that nobody's text can end a turn.

        Raises:
            InvalidArgumentError: not a string, or one with unpaired surrogates.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text must be a string, got {type(text).__name__}")
        tokenizer = self._tokenizer
        if not special_tokens and self._mentions_control_tokens(text):
            tokenizer = self._plain
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidArgumentError(f"text isn't valid Unicode: {error}") from error

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD, ids without a token become nothing.

        Args:
            tokens: ids, 0 or more.
            skip_special: leave out tokens that the tokenizer flags as special (``<think>`` and
                ``<tool_call>`` are not).

        Raises:
            InvalidArgumentError: something that isn't an id.
        """
        return b"".join(self.token_bytes(token, skip_special=skip_special) for token in tokens).decode(
            "utf-8", errors="replace"
        )

    def token_bytes(self, token: int, *, skip_special: bool = False) -> bytes:
        """Return the bytes that a token stands for; nothing for ids beyond the tokenizer.

        Raises:
            InvalidArgumentError: not an integer of 0 or more.
        """
        if isinstance(token, bool) or not hasattr(token, "__index__") or token < 0:
            raise InvalidArgumentError(f"a token must be an integer of 0 or more, got {token!r}")
        if token >= self.vocab_size or (skip_special and token in self._special):
            return b""
        return self._bytes(int(token))

    def token_id(self, text: str | None) -> int | None:
        """Return the id of the token that is written so in the vocabulary, or None."""
        return None if text is None else self._tokenizer.token_to_id(text)

    def is_special(self, token: int) -> bool:
        """Tell whether the tokenizer flags a token as special."""
        return token in self._special

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without added tokens; loaded when a text first needs it."""
        description = json.loads(self._description)
        description["added_tokens"] = []
        description["post_processor"] = None
        return _load(json.dumps(description), self._where)

    def _mentions_control_tokens(self, text: str) -> bool:
        # A tokenizer may normalise before it looks for them (NFC turns U+212A into K).
        normalised = unicodedata.normalize("NFC", text)
        return any(control in text or control in normalised for control in self._control_texts)

    def _bytes(self, token: int) -> bytes:
        known = self._cache.get(token)
        if known is None:
            text = self._tokenizer.id_to_token(token) or ""
            try:
                known = bytes(_BYTE_OF_CHARACTER[character] for character in text)
            except KeyError:
                # An added token is written as it is, and may have characters outside the byte alphabet.
                known = text.encode("utf-8")
            self._cache[token] = known
        return known


def _load(description: str, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(description)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{where}: isn't a tokenizer that `tokenizers` can read ({error})") from error


def _byte_of_character() -> dict[str, int]:
    """Return the byte-level alphabet of GPT-2: printable bytes are themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
