"""Tokens to text one at a time, without ever showing half a character."""

from __future__ import annotations

import codecs

from lily_py.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of tokens into a stream of text.

    The pieces that `add` and `finish` return, joined, equal `Tokenizer.decode` of all tokens. Bytes of a
    character that isn't whole yet are held back; each token costs constant time.

    Args:
        tokenizer: gives each token's bytes.
        skip_special: leave out tokens that the tokenizer flags as special.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Take one token; return the text that it completes, often empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special=self._skip_special))

    def finish(self) -> str:
        """End the stream; return U+FFFD if it ended within a character, else nothing."""
        return self._decoder.decode(b"", final=True)
