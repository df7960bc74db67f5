"""This machine's limits, measured: sustained read bandwidth and peaks of the dot-product units."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from lily_py import _core
from lily_py.bench.workload import Spread, short
from lily_py.errors import BackendError

LILY_UNITS = {
    "avx512vnni": "vpdpwssd-512",
    "avx2": "vpmaddwd-256",
}
"""Kernel set of the CPU backend -> the unit that its matrix products run on (16-bit integers)."""

READ_BYTES = 1 << 30
"""Buffer for the sustained read bandwidth: far larger than any cache."""


class NativeRoofline(Protocol):
    """What the extension offers under ``_core.bench``."""

    def dot_units(self) -> list[tuple[str, str, int]]:
        """Return (name, what it multiplies, operations of one instruction) of each unit this CPU has."""
        ...

    def measure_dot_products(self, unit: str, threads: int, seconds: float, repeats: int) -> list[float]:
        """Return operations per second, two a multiply-add, of each repetition."""
        ...

    def measure_read_bandwidth(self, nbytes: int, threads: int, seconds: float, repeats: int) -> list[float]:
        """Return bytes per second of reading a buffer of `nbytes` again and again, of each repetition."""
        ...


@dataclass
class Roofline:
    """Measured limits; rates are per second.

    Attributes:
        threads: thread counts that were measured; the last one is what `bandwidth` and `peak` speak of.
        reads: size of the buffer in bytes -> thread count -> bytes per second.
        units: unit -> thread count -> operations per second.
        descriptions: unit -> what it multiplies.
    """

    threads: list[int]
    reads: dict[int, dict[int, Spread]] = field(default_factory=dict)
    units: dict[str, dict[int, Spread]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Sustained bytes per second from memory, all threads."""
        return self.reads[max(self.reads)][self.threads[-1]].median

    def peak(self, unit: str) -> float:
        """Return a unit's operations per second, all threads."""
        return self.units[unit][self.threads[-1]].median

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "threads": self.threads,
            "reads": {size: _spreads(by_threads) for size, by_threads in self.reads.items()},
            "units": {unit: _spreads(by_threads) for unit, by_threads in self.units.items()},
            "descriptions": self.descriptions,
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Roofline:
        """Build from decoded JSON."""
        return Roofline(
            values["threads"],
            {int(size): _from_spreads(by_threads) for size, by_threads in values["reads"].items()},
            {unit: _from_spreads(by_threads) for unit, by_threads in values["units"].items()},
            values["descriptions"],
        )


def native_roofline() -> NativeRoofline:
    """Return the extension's measuring functions.

    Raises:
        BackendError: it was built without them.
    """
    native = getattr(_core, "bench", None)
    if native is None:
        raise BackendError("the extension was built without the benchmark's native part (csrc/bench)")
    return cast("NativeRoofline", native)


def measure_roofline(
    threads: Sequence[int],
    *,
    sizes: Sequence[int] = (1 << 30,),
    units: Sequence[str] | None = None,
    repeats: int = 5,
    seconds: float = 0.3,
    say: Callable[[str], object] = lambda line: None,
) -> Roofline:
    """Measure the limits.

    Args:
        threads: thread counts, the one of interest last.
        sizes: buffers to read; the largest must be far larger than the caches.
        units: names of units; None for all that this CPU has.
        repeats: measurements of each figure.
        seconds: of each measurement.
        say: called with a line for each figure.
    """
    native = native_roofline()
    result = Roofline(list(threads))
    for size in sizes:
        for count in threads:
            rates = native.measure_read_bandwidth(size, count, seconds, repeats)
            result.reads.setdefault(size, {})[count] = spread = Spread.of(rates)
            say(f"read {size >> 10:,} KiB by {count}: {short(spread.median / 1e9)} GB/s")
    for name, description, _ in native.dot_units():
        if units is not None and name not in units:
            continue
        result.descriptions[name] = description
        for count in threads:
            rates = native.measure_dot_products(name, count, seconds, repeats)
            result.units.setdefault(name, {})[count] = spread = Spread.of(rates)
            say(f"{name} ({description}) by {count}: {short(spread.median / 1e9)} Gop/s")
    return result


def thread_counts(limit: int) -> list[int]:
    """Return 1, 2, 4, … and the limit itself."""
    counts = [1]
    while counts[-1] * 2 < limit:
        counts.append(counts[-1] * 2)
    return counts if limit == 1 else [*counts, limit]


def default_threads() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spreads(by_threads: dict[int, Spread]) -> dict[int, list[float]]:
    return {count: [s.median, s.low, s.high, s.count] for count, s in by_threads.items()}


def _from_spreads(by_threads: dict[str, list[float]]) -> dict[int, Spread]:
    return {int(count): Spread(v[0], v[1], v[2], int(v[3])) for count, v in by_threads.items()}
