"""Where time goes: the parts add up to the whole, and the bytes to what the checkpoint's tensors weigh."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily_py.bench import records
from lily_py.bench.cli import main
from lily_py.bench.limits import token_cost
from lily_py.bench.profile import OUTSIDE, ProfileResult, measure_profile, operation_costs, profile_rows
from lily_py.checkpoint import open_checkpoint


def test_a_decoded_token_reads_the_bytes_that_the_checkpoint_says(synthetic: Path) -> None:
    context = 200
    result = measure_profile(str(synthetic), contexts=(context,), decode=8, threads=2)
    cost = token_cost(open_checkpoint(synthetic))
    read = cost.weight_bytes + cost.state_bytes / 2 + cost.kv_bytes * context
    assert sum(each.bytes for each in result.decode[context].values()) == pytest.approx(read, rel=0.05)


def test_the_parts_add_up_to_the_whole_and_each_has_a_name_of_the_graph(synthetic_dense: Path) -> None:
    result = measure_profile(str(synthetic_dense), contexts=(30,), decode=4, threads=1)
    for costs in (result.prefill[30], result.decode[30]):
        assert {"embed", "norm_project", "delta_rule", "attend", "norm_gate_up", "head"} <= set(costs)
        assert "experts_up" not in costs
        assert all(cost.seconds > 0 for cost in costs.values())
        seconds = [cost.seconds for cost in costs.values()]
        assert seconds == sorted(seconds, reverse=True)


def test_what_no_operation_took_is_outside() -> None:
    before = {"nanoseconds of head": 1_000_000, "bytes of head": 10, "nanoseconds of embed": 5}
    after = {"nanoseconds of head": 5_000_000, "bytes of head": 50, "nanoseconds of embed": 5}
    costs = operation_costs(before, after, seconds=0.01, passes=2)
    assert costs["head"].seconds == pytest.approx(0.002)
    assert costs["head"].bytes == 20
    assert costs[OUTSIDE].seconds == pytest.approx(0.003)
    assert "embed" not in costs
    header, rows = profile_rows(costs, reading=True)
    assert header == ["operation", "ms", "share", "MB", "GB/s"]
    assert [row[:3] for row in rows] == [
        [OUTSIDE, "3.000", "60.0%"],
        ["head", "2.000", "40.0%"],
        ["all", "5.000", ""],
    ]


def test_the_command_saves_what_the_page_shows(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "results", tmp_path / "performance.md"
    arguments = [str(synthetic), "--contexts", "20", "--decode", "2", "--threads", "1", "--save", str(folder)]
    assert main(["profile", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "A decoded token after 20:" in shown
    record = records.load(folder / "profile-tiny-1-threads.json")
    assert isinstance(record.result, ProfileResult)
    assert main(["report", str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert "## tiny: where the time goes, 1 thread" in text
    assert "experts_up " in text
    assert "lily bench profile tiny --contexts 20 --decode 2 --threads 1" in text
