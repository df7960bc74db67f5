"""The effect of each CPU optimisation: the same workload with that one switched off."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lily_py.bench.arms import ArmResult, Say, lily_arm, run_rounds
from lily_py.bench.workload import Phase, Workload
from lily_py.checkpoint import open_checkpoint

_INSTRUCTION_SETS = {
    "avx512vnni": "the AVX-512 VNNI kernels (without: the next smaller instruction set)",
    "avxvnni": "the AVX-VNNI kernels, for machines without AVX-512",
    "avx2": "the AVX2 kernels, for machines without either",
}
_ARM_INSTRUCTION_SETS = {"neon": "the Neon kernels with dot products (without: plain C++)"}
_HERE = _ARM_INSTRUCTION_SETS if platform.machine() in ("aarch64", "arm64") else _INSTRUCTION_SETS

INSTRUCTION_SETS = tuple(_HERE)
"""Of this kind of machine, best first: each runs only where those before it don't."""

ABLATIONS = {
    "integer_dot": "integer dot products on the stored codes (without: codes are expanded to fp32)",
    "byte_dot": "byte dot products for one or two rows (without: the route of more rows)",
    "expanded_panels": "panels expanded once into cache for many rows (without: again for every eight rows)",
    "expert_groups": "rows of the same expert computed together (without: each on its own)",
    "attention_vectors": "attention in the machine's instruction set (without: plain C++)",
    "attention_spans": "attention of few rows shared out by spans of keys (without: by KV heads)",
    "prefetch": "the next weights, keys and values asked for ahead",
    "spin": "threads wait a moment before they sleep",
    **_HERE,
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
        better = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(name)] if name in INSTRUCTION_SETS else ()
        reference = better[-1] if better and better[-1] in self.arms else ""
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

    An instruction set is switched off together with all better ones, and its effect is against the arm
    without those.

    Raises:
        CheckpointError: the checkpoint can't be opened.
        ArmError: a process failed.
    """
    open_checkpoint(workload.checkpoint)  # what is wrong with it is said here
    switched_off: dict[str, list[str]] = {"": []}
    for name in names:
        position = INSTRUCTION_SETS.index(name) if name in INSTRUCTION_SETS else -1
        switched_off[name] = list(INSTRUCTION_SETS[: position + 1]) if position >= 0 else [name]
    arms = {name: lily_arm(workload, priority, off) for name, off in switched_off.items()}
    result = AblateResult(workload.name, workload)
    result.arms = {name: ArmResult(arm.program, arm.setting) for name, arm in arms.items()}
    run_rounds([(arm, result.arms[name]) for name, arm in arms.items()], workload, rounds, say)
    return result
