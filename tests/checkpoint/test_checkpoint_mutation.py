"""Lying JSON: whatever a checkpoint's descriptions say, only errors of lily come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_builders import CONFIG, EXPERTS, HIDDEN, mtp_head, quantised, trunk, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily_py.checkpoint import open_checkpoint
from lily_py.errors import LilyError

BODY = "language_model.model"
VALUES = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2, 3, 4, 5, 8, 32, 64, 100, 1 << 31, 1 << 64, 10**400),
        *(0.0, -0.5, 1e-6, 1.5, 1e308, float("nan"), float("inf")),
        *("", "4", "silu", "default", "qwen3_5_moe", "mxfp4", "affine", "\ud800", "x" * 3000),
        *([], {}, [0], [None], [[1]], {"bits": 4}, {"mode": "mxfp4"}, {"rope_theta": 1e4}, [{"a": 1}]),
    ]
)
FILES: dict[str, dict[str, Any]] = {
    "config.json": CONFIG
    | {
        "eos_token_id": [1, 2],
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "mode": "affine",
            f"{BODY}.layers.1.mlp.gate": {"group_size": 64, "bits": 8},
        },
    },
    "generation_config.json": {"eos_token_id": [1, 2], "temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}], "eos_token": "<end>"},
}


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the way to every value within a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*path, key))
    return found


PLACES = [(name, path) for name, content in FILES.items() for path in _paths(content)]
EXTRA_KEYS = [
    "mlp_only_layers",
    "decoder_sparse_step",
    "norm_topk_prob",
    "quantization_config",
    "rope_scaling",
]
EXTRA = [
    ("config.json", ("text_config", key)) for key in [*EXTRA_KEYS, "num_local_experts", "output_gate_type"]
]
MUTATIONS = st.lists(st.tuples(st.sampled_from(PLACES + EXTRA), VALUES), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = trunk(raw=False) | mtp_head()
    tensors |= quantised(f"{BODY}.layers.0.mlp.switch_mlp.up_proj", EXPERTS, 32, HIDDEN)
    tensors |= quantised(f"{BODY}.layers.1.mlp.gate", EXPERTS, HIDDEN, bits=8, group=64)
    return write_checkpoint(tmp_path_factory.mktemp("mutated") / "m", tensors)


def _write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _set(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """Return a copy of a JSON value with one place changed; a place that is gone stays gone."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, key: _set(value.get(key), rest, new)}
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return [*value[:key], _set(value[key], rest, new), *value[key + 1 :]]
    return value


def _opened_or_refused(folder: Path) -> bool:
    """Tell whether the folder has weights, or is refused with a message; other exceptions pass through."""
    try:
        return bool(open_checkpoint(folder).weights)
    except LilyError as error:
        return bool(str(error))


def test_the_files_open_as_they_are(folder: Path) -> None:
    """The property below would hold for files that can't be opened at all."""
    _write(folder, FILES)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.chat_template == "x"
    assert checkpoint.weights["layers.1.mlp.gate"].shape == (EXPERTS, HIDDEN)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=MUTATIONS)
def test_only_lily_errors_come_out_of_mutated_descriptions(
    folder: Path, mutations: list[tuple[tuple[str, tuple[str | int, ...]], Any]]
) -> None:
    files = dict(FILES)
    for (name, path), value in mutations:
        files[name] = _set(files[name], path, value)
    _write(folder, files)
    assert _opened_or_refused(folder)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(FILES)),
    start=st.integers(0, 2000),
    junk=st.binary(max_size=4),
    cut=st.booleans(),
)
def test_only_lily_errors_come_out_of_damaged_text(
    folder: Path, name: str, start: int, junk: bytes, cut: bool
) -> None:
    _write(folder, FILES)
    content = (folder / name).read_bytes()
    start %= len(content)
    (folder / name).write_bytes(content[:start] + junk + (b"" if cut else content[start + len(junk) :]))
    assert _opened_or_refused(folder)
