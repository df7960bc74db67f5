"""A checkpoint's vocabulary in GGUF: llama.cpp's server doesn't run without one, whatever it is asked."""

from __future__ import annotations

import json
from typing import Any

from lily_py.checkpoint import Checkpoint

_NO_MERGES = ["Ġ Ġ"]
"""An array can't be empty; this one joins nothing that a vocabulary without merges has."""


def add_vocabulary(writer: Any, gguf: Any, checkpoint: Checkpoint) -> None:
    """Write the tokens of a byte-level BPE, with unused ones up to the rows of the output head.

    Args:
        writer: of the file, before its header is written.
        gguf: the package.
    """
    path = checkpoint.tokenizer_folder / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("none")
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    special = {entry["id"]: entry["content"] for entry in values["added_tokens"]}
    by_id = {token: text for text, token in values["model"]["vocab"].items()} | special
    ids = range(checkpoint.config.vocab_size)
    kinds = gguf.TokenType
    types = [
        kinds.CONTROL if token in special else kinds.NORMAL if token in by_id else kinds.UNUSED
        for token in ids
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in values["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([by_id.get(token, f"[PAD{token}]") for token in ids])
    writer.add_token_types(types)
    writer.add_token_merges(merges or _NO_MERGES)
    if checkpoint.config.eos_token_ids:
        writer.add_eos_token_id(checkpoint.config.eos_token_ids[0])
    writer.add_add_bos_token(False)
