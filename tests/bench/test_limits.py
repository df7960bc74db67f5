"""Bytes and operations of a token, against hand-counted figures of the 35B-A3B shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lily_py import _core
from lily_py.bench import records
from lily_py.bench.cli import main
from lily_py.bench.limits import Limits, TokenCost, token_cost
from lily_py.bench.roofline import (
    LILY_UNITS,
    Roofline,
    default_threads,
    measure_roofline,
    native_roofline,
    thread_counts,
)
from lily_py.bench.run import RunOptions, run_comparison
from lily_py.bench.shapes import SHAPES, model_config
from lily_py.bench.synthetic import checkpoint_tensors
from lily_py.bench.workload import Spread, Workload
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import BackendError, InvalidArgumentError
from lily_py.loader import load_model


def write_hollow_checkpoint(shape: str, folder: Path) -> Path:
    """A checkpoint whose files have headers and holes: it can be opened, and takes no space."""
    folder.mkdir()
    tensors, quantization = checkpoint_tensors(SHAPES[shape], 0)
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(model_config(SHAPES[shape], [0], quantization)))
    return folder


def test_costs_of_the_full_model(tmp_path: Path) -> None:
    cost = token_cost(open_checkpoint(write_hollow_checkpoint("35b-a3b", tmp_path / "full")))
    # Per layer and token: 3 x 2048 x 512 weights in each of 8 experts and the shared one, 2048 x 257 in the
    # router and the shared gate; 33.7 M in a delta net and 27.3 M in an attention layer; 508.6 M in the head.
    delta_net = 2048 * (8192 + 4096 + 64) + 4096 * 2048
    attention = 2048 * (8192 + 1024) + 4096 * 2048
    four_bit = 30 * delta_net + 10 * attention + 40 * 9 * 3 * 2048 * 512
    eight_bit = 40 * 2048 * 257
    assert cost.prompt_operations == 2 * (four_bit + eight_bit)
    head = 248_320 * 2048
    # 4.5 and 8.5 bits a weight with scales and biases; norms, convolutions and decays are under 3 MB.
    assert cost.weight_bytes == pytest.approx((four_bit + head) * 4.5 / 8 + eight_bit * 8.5 / 8, rel=2e-3)
    assert cost.kv_bytes == 10 * 2 * 2 * 256 * 2
    assert cost.state_bytes == 30 * 2 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert cost.decode_bytes(1000) == cost.weight_bytes + cost.state_bytes + 1000 * cost.kv_bytes


def test_a_tied_embedding_is_read_as_the_output_head(synthetic_dense: Path) -> None:
    cost = token_cost(open_checkpoint(synthetic_dense))
    assert cost.weight_bytes == open_checkpoint(synthetic_dense).nbytes


def test_limits_divide_the_machine_by_the_token() -> None:
    roofline = Roofline(
        [1, 2],
        {1 << 30: {1: Spread(20e9, 0, 0, 1), 2: Spread(40e9, 0, 0, 1)}, 1 << 20: {2: Spread(1e12, 0, 0, 1)}},
        {"unit": {2: Spread(400e9, 0, 0, 1)}},
        {"unit": "sixteen bits"},
    )
    limits = Limits(TokenCost(10**9, 10**8, 10**6, 10**9), roofline, "unit")
    assert limits.rate("decode", 900) == pytest.approx(20.0)  # 40 GB/s over 2 GB
    assert limits.rate("prefill", 900) == pytest.approx(200.0)  # 400 Gop/s over 2 Gop


def test_thread_counts_double_up_to_the_limit() -> None:
    assert [thread_counts(limit) for limit in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


needs_native = pytest.mark.skipif(
    not hasattr(_core, "bench"), reason="needs the extension built with csrc/bench"
)


@needs_native
def test_measured_limits_are_possible_ones() -> None:
    threads = default_threads()
    result = measure_roofline([1, threads], sizes=(64 << 20,), repeats=2, seconds=0.02)
    assert 1e8 < result.bandwidth < 2e12
    operations = {name: count for name, _, count in native_roofline().dot_units()}
    assert result.units.keys() == operations.keys()
    for unit in result.units:
        # Nothing issues more than four of these instructions in a cycle at 7 GHz.
        assert 1e8 < result.peak(unit) < threads * 4 * 7e9 * operations[unit]
    again = Roofline.from_json(json.loads(json.dumps(result.as_json())))
    assert again == result


@needs_native
def test_the_unit_of_lilys_own_kernels_is_measured(synthetic: Path) -> None:
    backend = load_model(open_checkpoint(synthetic)).backend
    unit = next((unit for kernels, unit in LILY_UNITS.items() if kernels in backend), None)
    if unit is None:
        pytest.skip(f"no dot-product unit is named for {backend}")
    assert unit in [name for name, _, _ in native_roofline().dot_units()]


@needs_native
def test_impossible_measurements_are_refused() -> None:
    native = native_roofline()
    with pytest.raises(InvalidArgumentError, match="no unit 'abacus'"):
        native.measure_dot_products("abacus", 1, 0.01, 1)
    with pytest.raises(InvalidArgumentError, match="threads must be 1 to 1024, got 0"):
        native.measure_read_bandwidth(1 << 20, 0, 0.01, 1)
    with pytest.raises(InvalidArgumentError, match="must be positive"):
        native.measure_read_bandwidth(1 << 20, 1, 0.0, 1)


@needs_native
def test_the_roofline_command_prints_and_saves_every_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--threads", "1", "--read-kib", "65536,512", "--repeats", "1", "--seconds", "0.01"]
    assert main(["roofline", *arguments, "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    result = records.load(tmp_path / "roofline.json").result
    assert isinstance(result, Roofline)
    assert result.threads == [1]
    assert result.reads.keys() == {64 << 20, 512 << 10}
    for name, description, _ in native_roofline().dot_units():
        assert f"{name}: {description}" in printed
        assert result.peak(name) > 0


@needs_native
def test_a_comparison_measures_the_limits_of_its_threads(
    synthetic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lily_py.bench.run.READ_BYTES", 64 << 20)
    result = run_comparison(Workload(str(synthetic), (8,), 2, 1), RunOptions(rounds=1))
    assert result.limits is not None
    assert result.limits.decode(8) > 0
    assert result.best("lily", "decode", 8) is not None


def test_an_extension_without_the_native_part_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_core, "bench", raising=False)
    with pytest.raises(BackendError, match="built without the benchmark's native part"):
        native_roofline()
