"""Lying configurations and headers through opening, loading and running: lily's errors or sound results.

A crash would end the test run; any exception but lily's own fails the test. The data stays as it is, the
descriptions lie: what loads is run, so that a size believed wrongly would be met by the kernels too.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import checkpoints
from oracles.shapes import SHAPES

from lily_py.checkpoint import open_checkpoint
from lily_py.errors import LilyError
from lily_py.loader import load_model

SHAPE = replace(
    SHAPES["moe"], layers=2, interval=2, hidden=64, heads=2, kv_heads=1, head_dim=32, gdn_dim=16,
    experts=4, moe_width=64, shared_width=64, vocab=288,
)  # fmt: skip


@dataclass(frozen=True)
class Original:
    """A sound checkpoint: its folder, and the parts that are damaged."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    header: dict[str, Any] = field(repr=False)
    data: bytes = field(repr=False)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = checkpoints.build(
        tmp_path_factory.mktemp("fuzzed") / "model",
        SHAPE,
        "mlx-4bit-g32",
        dtype="bfloat16",
        mtp=True,
        overrides=[("*.o_proj", None), ("*.k_proj", checkpoints.FLOAT_MODES["nvfp4"])],
    )
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    return Original(folder, json.loads((folder / "config.json").read_text()), header, content[8 + size :])


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 4, 8, 15, 16, 17, 24, 31, 32, 48, 64, 96, 128, 256, 288, 512, 4096]),
    st.sampled_from([1 << 20, (1 << 31) - 1, 1 << 31, (1 << 62) - 1, 1 << 62, 1 << 63, 1 << 64, 0.25, 1.0]),
    st.integers(-5, 300),
)
JUNK = st.sampled_from([None, True, "", "4", "affine", "mxfp4", "full_attention", [], {}, float("nan")])
DTYPES = ["F32", "F16", "BF16", "U32", "U8", "I8", "F8_E4M3", "I64", "BOOL", "F99"]
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "I64": 8, "BOOL": 1}


def _set_config(config: dict[str, Any], where: str, index: int, value: Any) -> None:
    """Changes one value: of the text model, of the quantisation table, or of one entry of it."""
    block = config["text_config"] if where == "text" else config[where]
    key = sorted(block)[index % len(block)]
    if isinstance(block[key], dict) and block[key] and index % 3:
        block, key = block[key], sorted(block[key])[index % len(block[key])]
    elif isinstance(block[key], list) and block[key] and index % 3:
        block, key = block[key], index % len(block[key])
    block[key] = value
    if where == "quantization":
        config["quantization_config"] = config["quantization"]


def _reshape(entry: dict[str, Any], how: int) -> None:
    """Another shape of as many bytes, so that only what the tensor is used for can contradict it."""
    shape = entry["shape"]
    if how % 5 == 0:
        entry["shape"] = shape[::-1]
    elif how % 5 == 1:
        entry["shape"] = [int(np.prod(shape))]
    elif how % 5 == 2:
        entry["shape"] = [1, *shape]
    elif how % 5 == 3 and shape[0] % 2 == 0:
        entry["shape"] = [shape[0] // 2, *shape[1:-1], 2 * shape[-1]]
        if len(shape) == 1:
            entry["shape"] = [2, shape[0] // 2]
    elif entry["dtype"] in ("BF16", "F32", "U32"):  # the same bytes as another type
        halves = "U8" if entry["dtype"] == "BF16" else "F16"
        factor = SIZES[entry["dtype"]] // SIZES[halves]
        entry["dtype"], entry["shape"] = halves, [*shape[:-1], factor * shape[-1]]


def _set_header(header: dict[str, Any], index: int, kind: str, how: int, value: Any) -> None:
    names = sorted(name for name in header if name != "__metadata__")
    if not names:
        return
    name = names[index % len(names)]
    entry = header[name]
    if kind == "delete":
        del header[name]
    elif kind == "rename":
        other = names[how % len(names)]
        header[other], header[name] = entry, header[other]
    elif kind == "junk":
        header[name] = value
    elif not isinstance(entry, dict):
        return
    elif kind == "reshape":
        _reshape(entry, how)
    elif kind == "dtype":
        entry["dtype"] = DTYPES[how % len(DTYPES)]
    elif kind == "shape" and entry["shape"]:
        entry["shape"][how % len(entry["shape"])] = value
    elif kind == "offsets":
        entry["data_offsets"][how % 2] = value
    elif kind == "shift":
        entry["data_offsets"] = [offset + how % 64 - 32 for offset in entry["data_offsets"]]


CONFIG_CHANGES = st.tuples(
    st.just(_set_config),
    st.sampled_from(["text", "text", "quantization"]),
    st.integers(0, 99),
    st.one_of(NUMBERS, JUNK),
)
HEADER_CHANGES = st.tuples(
    st.just(_set_header),
    st.integers(0, 199),
    st.sampled_from(["reshape", "reshape", "rename", "delete", "junk", "dtype", "shape", "offsets", "shift"]),
    st.integers(0, 199),
    st.one_of(NUMBERS, JUNK),
)
CHANGES = st.lists(st.one_of(CONFIG_CHANGES, HEADER_CHANGES), min_size=1, max_size=3)
PATCHES = st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)), max_size=2)


def _outcome(folder: Path) -> str:
    """What the folder does: "ran", or lily's error."""
    try:
        model = load_model(open_checkpoint(folder), threads=1)
        sequence = model.new_sequence()
        logits = model.forward(sequence, np.array([1, 2, 3, 4, 5], np.int32), all=True)
        model.forward(sequence, np.array([6], np.int32))
        assert logits is not None
        return "ran"
    except LilyError as error:
        return f"{type(error).__name__}: {error}"


def _write(original: Original, config: dict[str, Any], header: dict[str, Any]) -> bytes:
    (original.folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def _mutate(original: Original, changes: list[Any], patches: list[tuple[int, bytes]], cut: int) -> str:
    config, header = copy.deepcopy(original.config), copy.deepcopy(original.header)
    for change, *arguments in changes:
        try:
            change(config if change is _set_config else header, *arguments)
        except (TypeError, KeyError, IndexError, AttributeError):
            continue  # an earlier change took away what this one is about
    start = bytearray(_write(original, config, header))
    for place, junk in patches:
        place %= len(start)
        start[place : place + len(junk)] = junk
    content = bytes(start) + original.data
    (original.folder / "model.safetensors").write_bytes(content[: len(content) - cut])
    return _outcome(original.folder)


OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_the_original_runs(original: Original) -> None:
    """The properties below would hold for a checkpoint that can't be loaded at all."""
    assert _mutate(original, [], [], 0) == "ran"


@settings(max_examples=1500, **OPTIONS)
@given(changes=CHANGES)
def test_lying_descriptions_are_refused_or_harmless(original: Original, changes: list[Any]) -> None:
    _mutate(original, changes, [], 0)


@settings(max_examples=500, **OPTIONS)
@given(changes=st.just([]) | CHANGES, patches=PATCHES, cut=st.sampled_from([0, 0, 0, 1, 2, 64, 1000]))
def test_damaged_bytes_are_refused_or_harmless(
    original: Original, changes: list[Any], patches: list[tuple[int, bytes]], cut: int
) -> None:
    _mutate(original, changes, patches, cut)


@pytest.mark.slow
@settings(max_examples=4000, **OPTIONS)
@given(changes=CHANGES, patches=st.just([]) | PATCHES)
def test_thousands_of_lies_are_refused_or_harmless(
    original: Original, changes: list[Any], patches: list[tuple[int, bytes]]
) -> None:
    _mutate(original, changes, patches, 0)
