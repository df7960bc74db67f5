"""What speculation by prompt lookup is worth, on texts that repeat their prompt more or less."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench.process import run_checkpoint_worker
from lily_py.bench.workload import Spread

TEXTS = {
    "a copy of the prompt": "the prompt again, word for word",
    "the prompt, edited": "the prompt again, every 25th token another",
    "matches by chance": "tokens drawn from fifty: pairs that stood before go on differently",
    "nothing repeats": "tokens drawn from the vocabulary",
}


@dataclass
class TextResult:
    """One text.

    Attributes:
        plain: tokens per second one by one.
        speculative: tokens per second with drafts.
        ratio: of both, measured one right after the other.
        drafted: tokens drafted.
        accepted: of them right.
        passes: over the weights, with drafts.
    """

    plain: Spread
    speculative: Spread
    ratio: Spread
    drafted: int
    accepted: int
    passes: int


@dataclass
class SpeculationResult:
    """Decoding speed with and without drafts.

    Attributes:
        checkpoint: name of the model's folder.
        context: tokens of the prompt.
        decode: tokens decoded after it.
        threads: compute threads.
        texts: name of the text -> what was found.
    """

    checkpoint: str
    context: int
    decode: int
    threads: int
    texts: dict[str, TextResult] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> SpeculationResult:
        """Build from decoded JSON."""
        names = ("checkpoint", "context", "decode", "threads")
        result = SpeculationResult(*[values[name] for name in names])
        for name, found in values["texts"].items():
            spreads = {spread: Spread(**found[spread]) for spread in ("plain", "speculative", "ratio")}
            result.texts[name] = TextResult(**{**found, **spreads})
        return result


def measure_speculation(
    checkpoint_path: str,
    *,
    context: int = 400,
    decode: int = 300,
    threads: int = 1,
    repeats: int = 3,
    priority: bool = False,
) -> SpeculationResult:
    """Decode known texts, drawing each token greedily but going on with the text's.

    So weights may be synthetic: which drafts are right is the text's matter.

    Raises:
        CheckpointError: the checkpoint can't be opened.
        ArmError: the process failed.
    """
    request = {
        "context": context,
        "decode": decode,
        "threads": threads,
        "repeats": repeats,
    }
    values = run_checkpoint_worker(
        "lily_py.bench.speculation_worker", checkpoint_path, request, priority=priority
    )
    result = SpeculationResult(Path(checkpoint_path).name, context, decode, threads)
    for name, found in values.items():
        plain, speculative = found["plain"], found["speculative"]
        result.texts[name] = TextResult(
            plain=Spread.of([decode / seconds for seconds in plain]),
            speculative=Spread.of([decode / seconds for seconds in speculative]),
            ratio=Spread.of([before / after for before, after in zip(plain, speculative, strict=True)]),
            drafted=found["drafted"],
            accepted=found["accepted"],
            passes=found["passes"],
        )
    return result


def speculation_rows(result: SpeculationResult) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the table."""
    header = ["text", "plain, tok/s", "with drafts, tok/s", "ratio", "drafted", "accepted", "tokens a pass"]
    rows = [
        [
            f"{name}: {TEXTS[name]}",
            str(found.plain),
            str(found.speculative),
            str(found.ratio),
            str(found.drafted),
            str(found.accepted),
            f"{result.decode / found.passes:.2f}",
        ]
        for name, found in result.texts.items()
    ]
    return header, rows
