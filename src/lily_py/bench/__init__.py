"""Benchmarks: synthetic checkpoints, measurements beside the peers, the machine's limits, reports."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lily bench`` with these arguments and return the exit status."""
    # Measured processes import this package too: they shouldn't pay for the command line.
    from lily_py.bench.cli import main as run

    return run(argv)
