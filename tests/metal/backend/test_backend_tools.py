"""`lily selftest` and `lily bench ablate --backend metal` on the simulator."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.usefixtures("fast")


@pytest.mark.slow
def test_ablations_show_in_the_counts_of_a_token() -> None:
    """The demo model: three Gated DeltaNet layers of 6 launches, one of attention with 8, and both ends."""
    ablate = importlib.import_module("lily_py.bench.ablate_metal")
    names = ("concurrent_pass", "token_handoff", "bf16_activations")
    costs = ablate.count_ablations("demo", names=names, context=8, decode=3)
    everything, serial, handoff, exact = (cost.token.counts for cost in costs)
    assert everything["launches"] == everything["stages"] == 3 * 6 + 8 + 3
    assert everything["barriers"] == everything["launches"] - 1
    assert serial["launches"] == everything["launches"]
    assert serial["barriers"] == 0  # the pass itself is in order
    assert handoff["launches"] == everything["launches"] - 1  # the host chooses
    assert exact["bytes read"] > everything["bytes read"]
    for phase in ("prompt", "token"):
        assert ablate.cost_table(costs, phase).count("\n") == 1 + len(costs)


@pytest.mark.slow
def test_ablations_show_in_the_counts_of_a_prompt() -> None:
    """The demo model has four mixtures; what concerns prompts alone leaves tokens as they are."""
    ablate = importlib.import_module("lily_py.bench.ablate_metal")
    names = ("compressed_weights", "gpu_routing", "fitted_tiles", "register_scan", "matrix_prefill")
    costs = ablate.count_ablations("demo", names=names, context=40, decode=1)
    whole, expanded, host, tiles, blocks, few = (cost.prompt.counts for cost in costs)
    assert {str(cost.token.counts) for cost in costs} == {str(costs[0].token.counts)}
    assert whole["command buffers"] == 1
    # An expansion for each matrix: of two in a mixer, of routed and shared experts both ways.
    assert expanded["launches"] - whole["launches"] == 4 * (2 + 4)
    assert expanded["barriers"] > whole["barriers"]
    assert expanded["bytes read"] > 1.2 * whole["bytes read"]
    assert expanded["bytes written"] > 2 * whole["bytes written"]
    # Three launches of routing.metal are the host's, which needs a command buffer of its own before.
    assert host["command buffers"] == 1 + 4
    assert whole["launches"] - host["launches"] == 4 * 3
    assert tiles["launches"] == whole["launches"]
    assert tiles["multiply-adds"] > 1.2 * whole["multiply-adds"]
    assert blocks["launches"] == whole["launches"]
    assert few["command buffers"] == 5
    assert few["launches"] > 2 * whole["launches"]


@pytest.mark.slow
def test_selftest_passes_and_reports_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("lily_py.cli").main(["selftest"]) == 0
    report = capsys.readouterr().out
    assert report.endswith("selftest: passed\n")
    for operation in (
        "embed", "norm_project", "delta_rule", "rotary_append", "attend", "project_add", "route",
        "experts_up", "experts_down", "norm_gate_up", "head", "logits", "greedy tokens",
    ):  # fmt: skip
        assert operation in report


def test_selftest_finds_an_operation_that_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that fail are listed at the end, and in the exit status."""
    selftest = importlib.import_module("lily_py.cli.selftest")
    checks = [selftest.Check("dense: attend", "1.0e-01 of 0.0002", False), selftest.Check("x", "fine", True)]
    monkeypatch.setattr(selftest, "_checks", lambda backend: iter(checks))
    assert importlib.import_module("lily_py.cli").main(["selftest"]) == 1
    report = capsys.readouterr().out
    assert "FAIL  dense: attend" in report
    assert report.endswith("selftest: FAILED: dense: attend\n")
