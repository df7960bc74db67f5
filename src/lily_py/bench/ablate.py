"""The effect of each CPU optimisation: the same workload with that one switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lily_py.bench.arms import ArmResult, Say, lily_arm, run_rounds
from lily_py.bench.workload import Phase, Workload

ABLATIONS = {
    "integer_dot": "integer dot products on the stored codes (without: codes are expanded to fp32)",
    "avx512vnni": "the AVX-512 VNNI kernels (without: the next smaller instruction set)",
    "avx2": "the AVX2 kernels, for machines without AVX-512",
}
"""What the CPU backend can switch off alone."""


@dataclass
class AblateResult:
    """lily with everything on (the first arm), and with one optimisation less in each further arm."""

    checkpoint: str
    workload: Workload
    arms: dict[str, ArmResult] = field(default_factory=dict)

    def effect(self, name: str, phase: Phase, context: int) -> float | None:
        """Return how many times faster the optimisation makes a figure, or None if it wasn't measured."""
        reference = "avx512vnni" if name == "avx2" and "avx512vnni" in self.arms else ""
        whole, less = (self.arms[key].spread(phase, context) for key in (reference, name))
        return whole.median / less.median if whole and less else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "kind": "ablate",
            "checkpoint": self.checkpoint,
            "workload": {**asdict(self.workload), "checkpoint": self.checkpoint},
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> AblateResult:
        """Build from decoded JSON."""
        arms = {name: ArmResult.from_json(arm) for name, arm in values["arms"].items()}
        return AblateResult(values["checkpoint"], Workload.from_json(values["workload"]), arms)


def run_ablations(
    workload: Workload,
    *,
    names: Sequence[str] = tuple(ABLATIONS),
    rounds: int = 3,
    priority: bool = False,
    say: Say = lambda line: None,
) -> AblateResult:
    """Measure the workload with everything on and with each of `names` off, in rounds of alternating order.

    The AVX2 kernels only run where the AVX-512 ones don't: ``avx2`` is measured with both off, and its effect
    is against the arm without AVX-512.
    """
    switched_off: dict[str, list[str]] = {"": []}
    for name in names:
        switched_off[name] = ["avx512vnni", "avx2"] if name == "avx2" else [name]
    arms = {name: lily_arm(workload, priority, off) for name, off in switched_off.items()}
    result = AblateResult(workload.name, workload)
    result.arms = {name: ArmResult(arm.program, arm.setting) for name, arm in arms.items()}
    run_rounds([(arm, result.arms[name]) for name, arm in arms.items()], workload, rounds, say)
    return result
