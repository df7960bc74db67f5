"""Template rendering, tokenizer and packing of generated conversations into rows of tokens."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .data import Conversation

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (  # the family's split: marks join letters, digits stand alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OPENING = r"(?:<think>\n(?:\n</think>\n\n)?)?"  # the generation prompt holds this already
ANSWER = re.compile(r"<\|im_start\|>assistant\n" + OPENING + r"(.*?<\|im_end\|>\n)", re.S)


def _fail(message: str) -> None:
    raise TemplateError(message)


class Template:
    """The chat template, compiled as servers compile it."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _fail
        self.compiled = environment.from_string(TEMPLATE.read_text())

    def render(self, conversation: Conversation, **options: Any) -> str:
        """Return the text of a whole conversation; without thinking its reasoning is left empty."""
        messages = conversation.messages
        if not conversation.thinking:
            messages = [{**m, "reasoning_content": ""} if m["role"] == "assistant" else m for m in messages]
        return self.compiled.render(messages=messages, tools=conversation.tools, **options)


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE of at most `size` tokens with the family's split and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = re.compile("|".join(map(re.escape, SPECIAL + PLAIN)))
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL) - len(PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in tags.split(text)), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in PLAIN])
    return tokenizer


def answers_of(text: str) -> list[tuple[int, int]]:
    """Return the [start, end) character spans of what the assistant says."""
    return [match.span(1) for match in ANSWER.finditer(text)]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (token ids, is part of an answer) of each text."""
    encoded = []
    for text, e in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
        starts = np.array([start for start, _ in e.offsets])
        inside = np.zeros(len(starts), bool)
        for a, b in answers_of(text):
            inside |= (starts >= a) & (starts < b - 1)
        encoded.append((np.array(e.ids, np.int32), inside))
    return encoded


def pack(
    items: Sequence[tuple[np.ndarray, np.ndarray]], kinds: Sequence[str], length: int, end: int
) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """Pack whole conversations into rows of `length` tokens, each conversation followed by the `end` token.

    Returns ids [N, length] int32, classes [N, length] uint8 (0 padding, 1 prompt, 2 answer) and, by kind,
    how many conversations were too long for a row.
    """
    dropped: Counter[str] = Counter()
    rows: list[list[np.ndarray]] = []
    classes: list[list[np.ndarray]] = []
    room: list[int] = []
    window: list[int] = []
    for (ids, inside), kind in zip(items, kinds, strict=True):
        need = len(ids) + 1
        if need > length:
            dropped[kind] += 1
            continue
        fits = [i for i in window if room[i] >= need]
        if fits:
            row = min(fits, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            classes.append([])
            room.append(length)
            window = sorted([*window, row], key=room.__getitem__)[-16:]
        rows[row].append(np.append(ids, end))
        classes[row].append(np.append(inside, False).astype(np.uint8) + 1)
        room[row] -= need
    out = np.full((len(rows), length), end, np.int32)
    kind_of = np.zeros((len(rows), length), np.uint8)
    for i, (row, cls) in enumerate(zip(rows, classes, strict=True)):
        flat = np.concatenate(row)
        out[i, : len(flat)] = flat
        kind_of[i, : len(flat)] = np.concatenate(cls)
    return out, kind_of, dropped
