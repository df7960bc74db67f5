"""The tokenizer, chat template and generation defaults of the tiny checkpoints: byte-level, ChatML."""

from __future__ import annotations

import json
from pathlib import Path

# Added tokens in the family's order; False marks those `skip_special_tokens` keeps.
ADDED_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
MERGES = [tuple(pair.split()) for pair in ("t h", "th e", "i n", "e r", "a n", "in g", "Ġ a", "Ġ the", "o u")]

CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- message.content or '' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}
"""


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Ordinary tokens: the bytes in order, then the results of the merges."""
    tokens = byte_symbols() + [left + right for left, right in MERGES]
    return {token: id for id, token in enumerate(tokens)}


def token_ids() -> dict[str, int]:
    """Ids of the added tokens, which follow the ordinary ones."""
    first = 256 + len(MERGES)
    return {token: first + i for i, token in enumerate(ADDED_TOKENS)}


def write(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    ids = token_ids()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    words = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s+"
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, "special": special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token, special in ADDED_TOKENS.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary(),
            "merges": [list(pair) for pair in MERGES],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    generation_config = {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
