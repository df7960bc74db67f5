"""What several of metalsim's tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
KERNELS, CORPUS, HOST = HERE / "kernels", HERE / "corpus", HERE / "host"

sys.path.insert(0, str(HERE.parents[1] / "tools"))

from metalsim.simulator import Simulator  # noqa: E402


def run_sort(
    sim: Simulator,
    keys: npt.NDArray[np.uint32],
    bins: int,
    barrier: bool = True,
    source: Path = KERNELS / "sort.metal",
) -> npt.NDArray[np.uint32]:
    """Counting sort by three dispatches of one concurrent pass; returns the order."""
    library = sim.compile(source)
    n = len(keys)
    k, counts = sim.buffer(keys, "keys"), sim.buffer(np.zeros(bins, np.uint32), "counts")
    offsets, order = sim.buffer(4 * bins, "offsets"), sim.buffer(4 * n, "order")
    p = np.array([n, bins], np.uint32)
    with sim.encoder(concurrent=True) as encoder:
        encoder.dispatch(library, "hist", {0: k, 1: counts, 2: p}, threads=n, group=256)
        if barrier:
            encoder.barrier()
        encoder.dispatch(library, "scan", {0: counts, 1: offsets, 2: p}, groups=1, group=256)
        encoder.barrier()
        encoder.dispatch(library, "scatter", {0: k, 1: offsets, 2: order, 3: p}, threads=n, group=256)
    return order.array(np.uint32).copy()


def kinds(sim: Simulator) -> set[str]:
    """Kinds of all reports."""
    return {d.kind for d in sim.diagnostics()}
