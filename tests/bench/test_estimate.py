"""The cost model: hand-counted work, published speeds explained, plausible estimates."""

from __future__ import annotations

import pytest

from lily_py.bench.chips import CHIPS, find_chip
from lily_py.bench.cli import main
from lily_py.bench.estimate import PUBLISHED, calibrate, calibration_error, lily_estimate
from lily_py.bench.metal_work import LILY, LILY_TENSOR, PUBLIC, decode_work, prompt_work
from lily_py.bench.shapes import SHAPES
from lily_py.errors import InvalidArgumentError

SHAPE = SHAPES["35b-a3b"]


def test_the_public_engines_counts_are_those_that_were_counted_in_its_source() -> None:
    token = decode_work(PUBLIC, SHAPE, 4096)
    assert (token.launches, token.stages) == (605, 425)
    # 1,667.2 MB of weights and the state read twice and written once, 62.9 MB each
    assert token.stream_bytes / 1e6 == pytest.approx(1667.2 + 3 * 62.9, abs=1)
    assert token.kv_bytes == 20_480 * 4096
    assert sum(chunk.launches for chunk in prompt_work(PUBLIC, SHAPE, 4096)) == 1820


def test_lily_needs_263_launches_and_stages_a_token() -> None:
    token = decode_work(LILY, SHAPE, 4096)
    assert (token.launches, token.stages) == (263, 263)
    assert token.stream_bytes / 1e6 == pytest.approx(1667.2 + 2 * 62.9, abs=1)


def test_a_prompt_is_cut_into_chunks_and_costs_its_operations() -> None:
    chunks = prompt_work(LILY, SHAPE, 10_000)
    assert len(chunks) == 5
    assert {chunk.launches for chunk in chunks} == {30 * 14 + 10 * 13}
    # 2.437 G multiply-adds a token, and what pads the experts' rows
    operations = sum(chunk.matrix_operations for chunk in chunks)
    assert 1.0 < operations / (2 * 2.437e9 * 10_000) < 1.12
    # 163,840 operations for each pair of a query and a key
    assert sum(c.attention_operations for c in chunks) == 163_840 * (10_000 * 10_001 // 2)
    assert prompt_work(LILY, SHAPE, 8)[0].stream_bytes < prompt_work(LILY, SHAPE, 2048)[0].stream_bytes / 3


def test_longer_blocks_read_the_weights_less_often() -> None:
    short, long = (prompt_work(engine, SHAPE, 8192) for engine in (LILY, LILY_TENSOR))
    assert (len(short), len(long)) == (4, 2)
    assert sum(c.stream_bytes for c in short) == pytest.approx(2 * sum(c.stream_bytes for c in long))
    assert sum(c.matrix_operations for c in short) > sum(c.matrix_operations for c in long)


def test_the_model_explains_the_published_speeds() -> None:
    errors = calibration_error(calibrate())
    assert set(errors) == set(PUBLISHED)
    assert max(abs(prefill) for prefill, _ in errors.values()) < 0.06
    assert max(abs(decode) for _, decode in errors.values()) < 0.03


def test_calibrated_efficiencies_are_physical() -> None:
    assert all(0.3 < value < 1 for value in vars(calibrate()).values())


def test_more_bandwidth_and_less_context_are_faster() -> None:
    slow, fast = (lily_estimate(SHAPE, CHIPS[name], (256, 65_536)) for name in ("m4-max", "m5-max"))
    assert slow[0].decode > slow[1].decode
    assert all(a.decode < b.decode and a.prefill < b.prefill for a, b in zip(slow, fast, strict=True))


def test_the_command_prints_estimates_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--chip", "M5 Max", "--contexts", "256,4096"]) == 0
    out = capsys.readouterr().out
    assert "nothing was measured" in out
    assert "| prefill error" in out
    assert out.count("131,072") == 1


@pytest.mark.parametrize("arguments", [["--chip", "m9"], ["--chip", "m5", "--shape", "7b"]])
def test_unknown_names_are_answered_with_the_known_ones(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments]) == 1
    assert "choose one of" in capsys.readouterr().err


def test_chips_are_found_as_people_write_them() -> None:
    assert find_chip("M3 Ultra") is CHIPS["m3-ultra"]
    with pytest.raises(InvalidArgumentError, match="m5-max"):
        find_chip("")
