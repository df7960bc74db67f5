"""lily beside its peers: the same work in fresh processes, in rounds whose order alternates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench import llama_cpp, mlx_lm
from lily_py.bench.arms import Arm, ArmResult, Say, describe_rates, lily_arm, run_rounds
from lily_py.bench.limits import Limits, TokenCost, token_cost
from lily_py.bench.process import ArmError, Finished, run_worker
from lily_py.bench.roofline import LILY_UNITS, READ_BYTES, Roofline, native_roofline
from lily_py.bench.workload import Measured, Phase, Spread, Workload
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import BackendError, InvalidArgumentError

PEERS = ("llama.cpp", "mlx-lm")


@dataclass
class RunResult:
    """A comparison.

    Attributes:
        checkpoint: name of the model's folder.
        weight_bytes: of all its weights.
        workload: contexts, tokens to decode, threads.
        arms: lily first.
        trials: program's setting -> what a short trial of it gave.
        notes: what wasn't measured, and why.
        cost: bytes and operations of a token.
        roofline: limits measured in the same run, or None.
        unit: the dot-product unit that lily's kernels use.
    """

    checkpoint: str
    weight_bytes: int
    workload: Workload
    arms: list[ArmResult] = field(default_factory=list)
    trials: dict[str, Measured] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: TokenCost | None = None
    roofline: Roofline | None = None
    unit: str = ""

    @property
    def limits(self) -> Limits | None:
        """The rates that the machine allows, if it was measured."""
        if self.roofline is None or self.cost is None or self.unit not in self.roofline.units:
            return None
        return Limits(self.cost, self.roofline, self.unit)

    @property
    def programs(self) -> list[str]:
        """Programs in the order of the arms."""
        return list(dict.fromkeys(arm.program for arm in self.arms))

    def best(self, program: str, phase: Phase, context: int) -> tuple[Spread, str] | None:
        """Return a program's highest median and the setting that gave it."""
        found = [
            (spread, arm.setting)
            for arm in self.arms
            if arm.program == program and (spread := arm.spread(phase, context))
        ]
        return max(found, key=lambda item: item[0].median) if found else None

    def advantage(self, peer: str, phase: Phase, context: int) -> Spread | None:
        """Return lily's rate over that of a peer's fastest setting, round by round: what disturbs the
        machine for longer than a round disturbs both."""
        found = self.best(peer, phase, context)
        mine = next((arm for arm in self.arms if arm.program == "lily"), None)
        if found is None or mine is None:
            return None
        theirs = next(arm for arm in self.arms if arm.program == peer and arm.setting == found[1])
        ratios = [
            ours.rates(phase)[context] / other.rates(phase)[context]
            for ours, other in zip(mine.rounds, theirs.rounds, strict=False)
            if context in ours.rates(phase) and context in other.rates(phase)
        ]
        return Spread.of(ratios) if ratios else None

    def digests(self) -> dict[int, set[str]]:
        """Return what lily generated for each context: one digest each, if it repeats."""
        seen: dict[int, set[str]] = {}
        for arm in self.arms:
            if arm.program == "lily":
                for measured in arm.rounds:
                    for context, digest in measured.digests.items():
                        seen.setdefault(context, set()).add(digest)
        return seen

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "kind": "run",
            "checkpoint": self.checkpoint,
            "weight_bytes": self.weight_bytes,
            "workload": {**asdict(self.workload), "checkpoint": self.checkpoint},
            "arms": [asdict(arm) for arm in self.arms],
            "trials": {name: trial.as_json() for name, trial in self.trials.items()},
            "notes": self.notes,
            "cost": asdict(self.cost) if self.cost else None,
            "roofline": self.roofline.as_json() if self.roofline else None,
            "unit": self.unit,
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> RunResult:
        """Build from decoded JSON."""
        arms = [ArmResult.from_json(arm) for arm in values["arms"]]
        return RunResult(
            values["checkpoint"],
            values["weight_bytes"],
            Workload.from_json(values["workload"]),
            arms,
            {name: Measured.from_json(trial) for name, trial in values["trials"].items()},
            values["notes"],
            TokenCost(**values["cost"]) if values["cost"] else None,
            Roofline.from_json(values["roofline"]) if values["roofline"] else None,
            values["unit"],
        )


@dataclass(frozen=True)
class RunOptions:
    """How to compare.

    Attributes:
        peers: of `PEERS`.
        rounds: fresh processes of each arm.
        llama_settings: settings of llama.cpp to measure; empty to try them all and keep the fastest.
        gguf_folder: where the GGUF files lie; None for beside the checkpoint.
        peer_budget: seconds that one figure of a slow peer may take in a round.
        priority: put the measured processes before other work (Linux, as root).
        limits: measure the machine's limits too.
    """

    peers: tuple[str, ...] = ()
    rounds: int = 3
    llama_settings: tuple[llama_cpp.Setting, ...] = ()
    gguf_folder: Path | None = None
    peer_budget: float = 60.0
    priority: bool = False
    limits: bool = True


def run_comparison(workload: Workload, options: RunOptions, say: Say = lambda line: None) -> RunResult:
    """Measure lily and its peers.

    Args:
        say: called with a line for each step, and for each peer that can't be measured.

    Raises:
        InvalidArgumentError: an unknown peer, no rounds, a context beyond the model's.
        CheckpointError: the checkpoint can't be opened.
        ArmError: lily's own process failed.
    """
    if unknown := [peer for peer in options.peers if peer not in PEERS]:
        raise InvalidArgumentError(f"peer {unknown[0]!r} isn't known; choose from {', '.join(PEERS)}")
    if options.rounds < 1:
        raise InvalidArgumentError(f"rounds must be positive, got {options.rounds}")
    checkpoint = open_checkpoint(workload.checkpoint)
    room = checkpoint.config.max_position_embeddings
    if max(workload.contexts) + workload.decode > room:
        raise InvalidArgumentError(
            f"context {max(workload.contexts)} and {workload.decode} decoded tokens are more than the {room} "
            "positions of the model"
        )
    result = RunResult(workload.name, checkpoint.nbytes, workload, cost=token_cost(checkpoint))

    def note(line: str) -> None:
        result.notes.append(line)
        say(line)

    if options.limits:
        result.roofline = _limits(workload, options.priority, note)
    arms = [lily_arm(workload, options.priority)]
    if "llama.cpp" in options.peers:
        arms += _llama_arms(workload, options, result, say, note)
    if "mlx-lm" in options.peers:
        arms += _mlx_arms(workload, options, result, say, note)
    result.arms = [ArmResult(arm.program, arm.setting) for arm in arms]
    run_rounds(list(zip(arms, result.arms, strict=True)), workload, options.rounds, say)
    backend = str(result.arms[0].rounds[0].facts["backend"])
    result.unit = next((unit for kernels, unit in LILY_UNITS.items() if kernels in backend), "")
    return result


def _limits(workload: Workload, priority: bool, note: Say) -> Roofline | None:
    try:
        native_roofline()
    except BackendError as error:
        note(f"limits: not measured: {error}")
        return None
    request = {
        "threads": [workload.threads],
        "sizes": [READ_BYTES],
        "units": list(LILY_UNITS.values()),
        "repeats": 3,
        "seconds": 0.2,
    }
    values, _ = run_worker("lily_py.bench.roofline_worker", request, priority=priority)
    return Roofline.from_json(values)


def _llama_arms(
    workload: Workload,
    options: RunOptions,
    result: RunResult,
    say: Say,
    note: Say,
) -> list[Arm]:
    """Try every setting once at one context, and keep the fastest of each phase."""
    if reason := llama_cpp.missing_reason():
        note(f"llama.cpp: not measured: {reason}")
        return []

    def arm(setting: llama_cpp.Setting) -> Arm:
        def measure(work: Workload) -> tuple[Measured, list[Finished]]:
            return llama_cpp.run_setting(
                setting, work, gguf_folder=options.gguf_folder, priority=options.priority
            )

        return Arm("llama.cpp", str(setting), workload.contexts, measure)

    if options.llama_settings:
        return [arm(setting) for setting in options.llama_settings]
    context = sorted(workload.contexts)[len(workload.contexts) // 2]
    short_work = Workload(workload.checkpoint, (context,), min(32, workload.decode), workload.threads)
    trials: list[tuple[llama_cpp.Setting, Measured]] = []
    for setting in llama_cpp.candidate_settings(workload.contexts):
        try:
            measured, _ = arm(setting).measure(short_work)
        except (ArmError, InvalidArgumentError) as error:
            note(f"llama.cpp {setting}: not measured: {error}")
            continue
        trials.append((setting, measured))
        result.trials[f"llama.cpp {setting}"] = measured
        say(f"trial: llama.cpp {setting}: {describe_rates(measured)}")
    return [arm(setting) for setting in llama_cpp.best_settings(trials, context)]


def _mlx_arms(workload: Workload, options: RunOptions, result: RunResult, say: Say, note: Say) -> list[Arm]:
    """Try both number types on a few tokens; keep the faster, for the contexts that fit the budget."""
    if reason := mlx_lm.missing_reason():
        note(f"mlx-lm: not measured: {reason}")
        return []
    short_work = Workload(workload.checkpoint, (16,), 4, workload.threads)
    trials: dict[str, Measured] = {}
    for dtype in mlx_lm.DTYPES:
        try:
            trials[dtype], _ = mlx_lm.run_dtype(dtype, short_work, priority=options.priority)
        except ArmError as error:
            note(f"mlx-lm {dtype}: not measured: {error}")
            continue
        result.trials[f"mlx-lm {dtype}"] = trials[dtype]
        say(f"trial: mlx-lm {dtype}: {describe_rates(trials[dtype])}")
    if not trials:
        return []
    dtype = max(trials, key=lambda name: trials[name].prefill[16])
    contexts = []
    for context in workload.contexts:
        seconds = context / trials[dtype].prefill[16] + workload.decode / trials[dtype].decode[16]
        if seconds <= options.peer_budget:
            contexts.append(context)
        else:
            note(
                f"mlx-lm: context {context} not measured: about {seconds:.0f} s a round at the rates of the "
                f"trial, over the budget of {options.peer_budget:.0f} s"
            )
    if not contexts:
        return []

    def measure(work: Workload) -> tuple[Measured, list[Finished]]:
        work = Workload(work.checkpoint, tuple(contexts), work.decode, work.threads)
        measured, finished = mlx_lm.run_dtype(dtype, work, priority=options.priority)
        return measured, [finished]

    return [Arm("mlx-lm", dtype, tuple(contexts), measure)]
