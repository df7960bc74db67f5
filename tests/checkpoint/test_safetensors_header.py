"""Safetensors headers: places agree with the official library, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_builders import header_bytes, plain, write_file, write_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily_py.checkpoint.safetensors_header import read_header
from lily_py.errors import CheckpointError, CheckpointNotFoundError

TENSORS = {"a": plain(3, 5), "b": plain(4, dtype="F32"), "c": plain(2, 2, 2, dtype="U32"), "d": plain(0, 7)}


def test_places_are_those_of_the_official_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"a": np.arange(15, dtype=np.float16).reshape(3, 5), "b": np.ones((2, 1, 4), np.uint8)}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    raw = path.read_bytes()
    table = read_header(path, file=3)
    assert table.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = table[name]
        assert (tensor.file, tensor.shape, tensor.nbytes) == (3, array.shape, array.nbytes)
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()
    assert (table["a"].dtype, table["b"].dtype) == ("F16", "U8")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"absent\.safetensors"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "absent.safetensors")


def _changed(**entry: Any) -> bytes:
    header, _ = header_bytes(TENSORS)
    header["b"] |= entry
    return json.dumps(header).encode()


DATA = header_bytes(TENSORS)[1]


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (b"", b"", "isn't valid JSON"),
        (b"[]", b"", "expected an object"),
        (b"\xff\xfe", b"", "isn't valid JSON"),
        (b"[" * 100_000, b"", "isn't valid JSON"),
        (b'{"a": 1}', b"", "'a'.*expected an object"),
        (b'{"a": {}, "a": {}}', b"", "names 'a' twice"),
        (_changed(dtype="F99"), DATA, "'b'.*unknown dtype 'F99'"),
        (_changed(dtype=["F32"]), DATA, "'b'.*unknown dtype"),
        (_changed(shape=[5]), DATA, "'b'.*takes 20 bytes.*hold 16"),
        (_changed(shape=[-4]), DATA, "'b'.*shape"),
        (_changed(shape=[1 << 70]), DATA, "'b'.*shape"),
        (_changed(shape=[1] * 99), DATA, "'b'.*shape"),
        (_changed(shape="4"), DATA, "'b'.*shape"),
        (_changed(shape=[4.0]), DATA, "'b'.*shape"),
        (_changed(data_offsets=[0, 16]), DATA, "overlaps"),
        (_changed(data_offsets=[46, 30]), DATA, "'b'.*hold -16"),
        (_changed(data_offsets=[30]), DATA, "'b'.*data_offsets"),
        (_changed(data_offsets=[1 << 40, (1 << 40) + 16]), DATA, "'b'.*truncated|unused bytes"),
        (_changed(), DATA[:-1], "'c'.*truncated"),
        (_changed(), DATA + b"\0", "1 bytes after the last tensor"),
        (_changed(shape=[2], data_offsets=[30, 38]), DATA, "8 unused bytes before tensor 'c'"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: bytes, data: bytes, complaint: str) -> None:
    path = write_raw(tmp_path / "damaged.safetensors", header, data)
    with pytest.raises(CheckpointError, match=complaint) as error:
        read_header(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes are too few"),
        (b"\x01\0\0\0", "4 bytes are too few"),
        ((1 << 40).to_bytes(8, "little"), "over the format's limit"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "truncated"),
    ],
)
def test_files_too_short_for_their_header_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_header(path)


def test_a_folder_in_place_of_a_file_is_an_error_of_lily(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_header(tmp_path)


SIZES = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 16, 30, 46, 78, 1 << 40, 1 << 66, None, 0.5, "4", True])
FIELDS = st.one_of(
    st.tuples(
        st.just("dtype"), st.sampled_from(["F32", "BF16", "U8", "I64", "BOOL", "F8_E4M3", "X", 3, None])
    ),
    st.tuples(st.just("shape"), st.lists(SIZES, max_size=3) | SIZES),
    st.tuples(st.just("data_offsets"), st.lists(SIZES, min_size=1, max_size=3) | SIZES),
)
MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("field"), st.sampled_from([*TENSORS, "e"]), FIELDS),
        st.tuples(st.just("entry"), st.sampled_from([*TENSORS, "e"]), SIZES),
        st.tuples(st.just("data"), st.integers(-40, 40), st.none()),
        st.tuples(st.just("byte"), st.integers(0, 400), st.integers(0, 255)),
    ),
    min_size=1,
    max_size=3,
)


def _mutated(mutations: list[tuple[str, Any, Any]]) -> bytes:
    """Return the bytes of a small file after some of its fields, entries, data or bytes were changed."""
    header, data = header_bytes(TENSORS)
    flips = []
    for kind, where, value in mutations:
        if kind == "field" and isinstance(header.setdefault(where, {}), dict):
            header[where][value[0]] = value[1]
        elif kind == "entry":
            header[where] = value
        elif kind == "data":
            data = data + bytes(where) if where > 0 else data[: len(data) + where]
        elif kind == "byte":
            flips.append((where, value))
    text = json.dumps(header).encode()
    content = bytearray(len(text).to_bytes(8, "little") + text + data)
    for place, byte in flips:
        content[place % len(content)] = byte
    return bytes(content)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_mutated_headers_raise_lily_errors_or_agree_with_the_official_library(
    tmp_path: Path, mutations: list[tuple[str, Any, Any]]
) -> None:
    content = _mutated(mutations)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        table = read_header(path)
    except CheckpointError:
        return
    official = dict(safetensors.deserialize(content))
    assert table.keys() == official.keys()
    for name, tensor in table.items():
        assert list(tensor.shape) == official[name]["shape"]
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == official[name]["data"]


def test_an_unmutated_header_is_accepted(tmp_path: Path) -> None:
    """The property above would hold for a reader that refuses everything."""
    assert read_header(write_file(tmp_path / "x.safetensors", TENSORS)).keys() == TENSORS.keys()
