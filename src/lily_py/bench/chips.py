"""Published figures of Apple's chips, for estimates."""

from __future__ import annotations

from dataclasses import dataclass

from lily_py.errors import InvalidArgumentError


@dataclass(frozen=True)
class Chip:
    """One chip with all its GPU cores on.

    Attributes:
        name: as people write it.
        cores: GPU cores.
        bandwidth: of memory, in bytes per second, as specified.
        matrix_rate: 16-bit matrix operations per second, two a multiply-add: of the tensor units where there
            are some (measured by others, scaled with the cores), else of the ALUs in fp32, which is the rate
            of simdgroup matrices there.
        tensor_units: whether the GPU has some.
    """

    name: str
    cores: int
    bandwidth: float
    matrix_rate: float
    tensor_units: bool = False


def _chip(name: str, cores: int, gigabytes: float, teraflops: float, tensor_units: bool = False) -> Chip:
    return Chip(name, cores, gigabytes * 1e9, teraflops * 1e12, tensor_units)


CHIPS: dict[str, Chip] = {
    "m1": _chip("M1", 8, 68, 2.6),
    "m1-pro": _chip("M1 Pro", 16, 200, 5.3),
    "m1-max": _chip("M1 Max", 32, 400, 10.6),
    "m1-ultra": _chip("M1 Ultra", 64, 800, 21),
    "m2": _chip("M2", 10, 100, 3.6),
    "m2-pro": _chip("M2 Pro", 19, 200, 6.8),
    "m2-max": _chip("M2 Max", 38, 400, 13.6),
    "m2-ultra": _chip("M2 Ultra", 76, 800, 27),
    "m3": _chip("M3", 10, 100, 3.6),
    "m3-pro": _chip("M3 Pro", 18, 150, 7),
    "m3-max": _chip("M3 Max", 40, 400, 16),
    "m3-ultra": _chip("M3 Ultra", 80, 819, 28),
    "m4": _chip("M4", 10, 120, 4.3),
    "m4-pro": _chip("M4 Pro", 20, 273, 8.5),
    "m4-max": _chip("M4 Max", 40, 546, 18),
    "m5": _chip("M5", 10, 153, 15.4, True),
    "m5-pro": _chip("M5 Pro", 20, 307, 28, True),
    "m5-max": _chip("M5 Max", 40, 614, 56, True),
}
"""Chips by their name on the command line; the largest GPU of each."""


def find_chip(name: str) -> Chip:
    """Return the chip of that name.

    Raises:
        InvalidArgumentError: there is none; the message lists those there are.
    """
    key = name.strip().lower().replace(" ", "-")
    if key not in CHIPS:
        raise InvalidArgumentError(f"chip {name!r} isn't known; choose one of {', '.join(CHIPS)}")
    return CHIPS[key]
