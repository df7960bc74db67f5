"""A tokenizer for synthetic checkpoints: a token for every byte; other ids are words with their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
"""


def write(folder: Path, vocab: int) -> list[int]:
    """Write ``tokenizer.json``, its configuration, a chat template and the generation defaults.

    The control tokens are the last ids of the vocabulary.

    Returns:
        The ids that end a turn.
    """
    tokens = [*_byte_symbols(), *(f"Ġw{token}" for token in range(256, vocab - len(_SPECIAL))), *_SPECIAL]
    ids = {token: position for position, token in enumerate(tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, "special": True, **plain} for token in _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 262_144,
    }
    eos_token_ids = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_ids}))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return eos_token_ids


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
