"""Arms of a comparison: programs at one setting each, measured in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lily_py.bench.process import Finished, run_worker
from lily_py.bench.workload import PHASES, Measured, Phase, Spread, Workload

Say = Callable[[str], object]
Measure = Callable[[Workload], tuple[Measured, list[Finished]]]


@dataclass(frozen=True)
class Arm:
    """One program at one setting.

    Attributes:
        program: such as ``llama.cpp``.
        setting: such as ``Q4_K_M:repack=0:fa=1:ub=512``; empty if there is only one.
        contexts: those it runs; a peer that would take too long leaves some out.
        measure: runs the workload in fresh processes.
    """

    program: str
    setting: str
    contexts: tuple[int, ...]
    measure: Measure

    @property
    def name(self) -> str:
        """Program and setting."""
        return f"{self.program} {self.setting}".strip()


@dataclass
class ArmResult:
    """All rounds of one arm."""

    program: str
    setting: str
    rounds: list[Measured] = field(default_factory=list)
    foreign_cores: list[float | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Program and setting."""
        return f"{self.program} {self.setting}".strip()

    @staticmethod
    def from_json(values: dict[str, Any]) -> ArmResult:
        """Build from decoded JSON."""
        return ArmResult(
            values["program"],
            values["setting"],
            [Measured.from_json(measured) for measured in values["rounds"]],
            values["foreign_cores"],
        )

    def spread(self, phase: Phase, context: int) -> Spread | None:
        """Return the median and range of tokens per second over the rounds, or None if it wasn't measured."""
        samples = [r.rates(phase)[context] for r in self.rounds if context in r.rates(phase)]
        return Spread.of(samples) if samples else None


def lily_arm(workload: Workload, priority: bool = False, ablate: Sequence[str] = ()) -> Arm:
    """Return lily's arm, with optimisations switched off if any are named."""

    def measure(work: Workload) -> tuple[Measured, list[Finished]]:
        request = {"workload": asdict(work), "ablate": list(ablate)}
        values, finished = run_worker("lily_py.bench.lily_worker", request, priority=priority)
        return Measured.from_json(values), [finished]

    setting = " ".join(f"without {name}" for name in ablate)
    return Arm("lily", setting, workload.contexts, measure)


def run_rounds(
    arms: Sequence[tuple[Arm, ArmResult]], workload: Workload, rounds: int, say: Say = lambda line: None
) -> None:
    """Measure all arms once a round, in an order that turns around from round to round.

    Raises:
        ArmError: a process failed.
    """
    for number in range(rounds):
        for arm, collected in arms if number % 2 == 0 else reversed(arms):
            measured, finished = arm.measure(workload)
            collected.rounds.append(measured)
            foreign = [f.foreign_cores for f in finished if f.foreign_cores is not None]
            collected.foreign_cores.append(max(foreign) if foreign else None)
            say(f"round {number + 1} of {rounds}: {arm.name}: {describe_rates(measured)}")


def describe_rates(measured: Measured) -> str:
    """Return one line with all rates."""
    parts = []
    for phase in PHASES:
        rates = ", ".join(f"{rate:.4g} at {context}" for context, rate in measured.rates(phase).items())
        parts.append(f"{phase} {rates}")
    return "; ".join(parts) + " tok/s"
