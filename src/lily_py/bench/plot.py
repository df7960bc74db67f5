"""Tokens per second against context: lily, the peers' fastest settings and the limit in one picture."""

from __future__ import annotations

from pathlib import Path

from lily_py.bench.extras import require
from lily_py.bench.run import RunResult
from lily_py.bench.workload import PHASES

_LINEAR_RANGE = 20
"""Rates that differ by more than this are drawn on a logarithmic axis."""

_COLOURS = {"lily": "#7b3fa0", "llama.cpp": "#d9822b", "mlx-lm": "#3a7ca5"}


def plot_run(result: RunResult, path: Path) -> Path:
    """Draw one panel a phase, medians with their range, and return the file.

    Raises:
        InvalidArgumentError: matplotlib isn't installed.
    """
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    figure, axes = require("matplotlib.pyplot").subplots(1, 2, figsize=(10, 4.2), constrained_layout=True)
    contexts = sorted(result.workload.contexts)
    for phase, panel in zip(PHASES, axes, strict=True):
        shown: list[float] = []
        for program in result.programs:
            points = [(c, best[0]) for c in contexts if (best := result.best(program, phase, c))]
            if not points:
                continue
            shown += [spread.median for _, spread in points]
            panel.errorbar(
                [context for context, _ in points],
                [spread.median for _, spread in points],
                yerr=[
                    [spread.median - spread.low for _, spread in points],
                    [spread.high - spread.median for _, spread in points],
                ],
                marker="o",
                capsize=3,
                label=program if program == "lily" else f"{program}, fastest setting",
                color=_COLOURS.get(program),
            )
        if limits := result.limits:
            shown += [limits.rate(phase, context) for context in contexts]
            panel.plot(
                contexts,
                [limits.rate(phase, context) for context in contexts],
                "--",
                color="#555555",
                label="limit: bandwidth" if phase == "decode" else f"limit: {limits.unit}",
            )
        panel.set_title(f"{result.checkpoint}: {phase}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(contexts, [f"{context:,}" for context in contexts])
        panel.set_xlabel("context, tokens")
        panel.set_ylabel("tokens per second")
        if shown and max(shown) > _LINEAR_RANGE * min(shown):
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    require("matplotlib.pyplot").close(figure)
    return path
