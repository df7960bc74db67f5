"""What every arm does: one request at a time, a synthetic prompt, then greedy decoding."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Workload:
    """One arm's work in one process.

    Attributes:
        checkpoint: folder of the model.
        contexts: prompt lengths; each is measured in both phases.
        decode: tokens generated after each prompt.
        threads: compute threads.
    """

    checkpoint: str
    contexts: tuple[int, ...]
    decode: int
    threads: int

    @property
    def name(self) -> str:
        """The checkpoint's name: the last part of its path or repository."""
        return Path(self.checkpoint).name

    @staticmethod
    def from_json(values: dict[str, Any]) -> Workload:
        """Build from what `asdict` gave."""
        return Workload(**{**values, "contexts": tuple(values["contexts"])})


@dataclass
class Measured:
    """What an arm's process found: token rates by context, and facts about the process.

    Attributes:
        prefill: context -> prompt tokens per second up to the first token.
        decode: context -> generated tokens per second after it.
        digests: context -> digest of the generated ids; only of arms that run the same prompt.
        facts: whatever else is worth a line, such as resident bytes.
    """

    prefill: dict[int, float] = field(default_factory=dict)
    decode: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Measured:
        """Build from decoded JSON, whose keys are text."""
        rates = {
            name: {int(context): value for context, value in values[name].items()}
            for name in ("prefill", "decode", "digests")
        }
        return Measured(**rates, facts=values["facts"])

    def rates(self, phase: Phase) -> dict[int, float]:
        """Return the rates of a phase, by context."""
        return self.prefill if phase == "prefill" else self.decode

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Summarise samples, of which there must be one at least."""
        return Spread(statistics.median(samples), min(samples), max(samples), len(samples))

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}..{short(self.high)}]"


def short(value: float) -> str:
    """Format with about three significant digits and no exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def prompt_ids(count: int, vocabulary: int, first: int = 0) -> NDArray[np.int32]:
    """Return a fixed prompt of any length, spread over the vocabulary: its prefixes are the shorter prompts.

    Token i is ``mix(i + 1) * vocabulary / 2^32`` with the finaliser of MurmurHash3 (32 bits) as `mix`.

    Args:
        first: position of the first token, for prompts that differ.
    """
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    mixed = mix32(x.astype(np.uint32)).astype(np.uint64)
    ids: NDArray[np.int32] = (mixed * np.uint64(vocabulary) >> np.uint64(32)).astype(np.int32)
    return ids


def mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's 32-bit finaliser."""
    x = x ^ x >> np.uint32(16)
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ x >> np.uint32(13)
    x = x * np.uint32(0xC2B2AE35)
    mixed: NDArray[np.uint32] = x ^ x >> np.uint32(16)
    return mixed


def digest_of(ids: Sequence[int]) -> str:
    """Return a short digest of generated ids."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]
