"""llama.cpp as a peer: its own `llama-bench` on the same weights, with the settings that change its speed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lily_py.bench.gguf_export import export_gguf
from lily_py.bench.process import Finished, run_process, run_worker
from lily_py.bench.workload import Measured, Workload
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError

BINARIES = "LILY_LLAMA_BIN"
"""Environment variable: the folder of llama.cpp's programs, if they aren't on the PATH."""

_WARMED_UP = 4096
"""Prompts longer than this have no warm-up: it would take minutes, and most of the prompt is warm anyway."""

FILE_TYPES = ("Q4_0", "Q4_K_M")


@dataclass(frozen=True)
class Setting:
    """One way to run llama.cpp.

    Attributes:
        file_type: of the GGUF file, such as ``Q4_K_M``.
        repack: weights are copied into the kernels' own layout at load time (its default).
        flash_attention: its fused attention.
        batch: tokens of a prompt computed together (its ``-ub``).
    """

    file_type: str
    repack: bool = True
    flash_attention: bool = True
    batch: int = 512

    def __str__(self) -> str:
        return f"{self.file_type}:repack={self.repack:d}:fa={self.flash_attention:d}:ub={self.batch}"

    @staticmethod
    def parse(text: str) -> Setting:
        """Read what `str` wrote; parts may be missing.

        Raises:
            InvalidArgumentError: it isn't of that form.
        """
        match = re.fullmatch(r"(\w+)(?::repack=([01]))?(?::fa=([01]))?(?::ub=(\d+))?", text)
        if not match:
            raise InvalidArgumentError(
                f"llama.cpp setting {text!r} isn't of the form TYPE:repack=0|1:fa=0|1:ub=N"
            )
        file_type, repack, attention, batch = match.groups()
        return Setting(file_type, repack != "0", attention != "0", int(batch or 512))


def candidate_settings(contexts: Iterable[int]) -> list[Setting]:
    """Return the settings to try: both file types, repacking and flash attention on and off, and larger
    batches where a prompt is longer than one."""
    batches = [512, 2048] if max(contexts) > 512 else [512]
    return [
        Setting(file_type, repack, attention, batch)
        for file_type in FILE_TYPES
        for repack in (True, False)
        for attention in (True, False)
        for batch in batches
    ]


def find_program(name: str) -> Path | None:
    """Return one of llama.cpp's programs, from ``$LILY_LLAMA_BIN`` or the PATH."""
    folder = os.environ.get(BINARIES)
    found = shutil.which(name, path=folder) if folder else shutil.which(name)
    return Path(found) if found else None


def missing_reason() -> str | None:
    """Say why llama.cpp can't be measured here, or None if it can."""
    if find_program("llama-bench") or importlib.util.find_spec("llama_cpp"):
        return None
    where = f"in the folder that {BINARIES} names" if os.environ.get(BINARIES) else "on the PATH"
    return (
        f"no llama-bench {where} and no package llama_cpp; set {BINARIES} to the folder of llama.cpp's "
        "programs, or pip install llama-cpp-python"
    )


def gguf_path(checkpoint: str, file_type: str, folder: Path | None = None) -> Path:
    """Return where the GGUF of a checkpoint lies: in `folder`, beside the checkpoint's folder, or in the
    user's cache for the demo model and repositories."""
    path = Path(checkpoint)
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lily" / "gguf"
        folder = path.resolve().parent if path.is_dir() else cache
    return folder / f"{path.name}-{file_type}.gguf"


def ensure_gguf(checkpoint: str, file_type: str, *, folder: Path | None = None, threads: int = 1) -> Path:
    """Return the GGUF of a checkpoint, making it if it isn't there or older than the weights.

    Q4_0 is lily's own exact export; other types are made from it by `llama-quantize`.

    Raises:
        InvalidArgumentError: `llama-quantize` is needed and isn't there.
        ArmError: it failed.
    """
    path = gguf_path(checkpoint, file_type, folder)
    opened = open_checkpoint(checkpoint)
    changed = max(file.stat().st_mtime for file in opened.files)
    if path.is_file() and path.stat().st_mtime >= changed:
        return path
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if file_type == "Q4_0":
        export_gguf(opened, partial, "q4_0")
    else:
        program = find_program("llama-quantize")
        if program is None:
            raise InvalidArgumentError(
                f"{path} isn't there, and no llama-quantize to make it; set {BINARIES} to its folder"
            )
        source = ensure_gguf(checkpoint, "Q4_0", folder=folder)
        run_process([str(program), "--allow-requantize", str(source), str(partial), file_type, str(threads)])
    partial.rename(path)
    return path


def run_setting(
    setting: Setting, workload: Workload, *, gguf_folder: Path | None = None, priority: bool = False
) -> tuple[Measured, list[Finished]]:
    """Measure one setting with `llama-bench`, or with llama-cpp-python where there is none.

    `llama-bench` warms up with a run of the same shape, computes the logits of a prompt's last token only,
    and draws its token ids at random.

    Raises:
        ArmError: it failed.
    """
    file = ensure_gguf(workload.checkpoint, setting.file_type, folder=gguf_folder, threads=workload.threads)
    if find_program("llama-bench") is None:
        request = {"file": str(file), "workload": asdict(workload), "setting": asdict(setting)}
        values, ended = run_worker("lily_py.bench.llama_worker", request, priority=priority)
        return Measured.from_json(values), [ended]
    measured = Measured(facts={"file_bytes": file.stat().st_size})
    finished: list[Finished] = []

    def bench(*arguments: str) -> list[dict[str, Any]]:
        command = [*_bench_command(setting, file, workload.threads), *arguments]
        finished.append(run_process(command, priority=priority))
        tests: list[dict[str, Any]] = json.loads(finished[-1].output)
        measured.facts["build"] = tests[0].get("build_commit", "unknown")
        return tests

    warmed = [context for context in workload.contexts if context <= _WARMED_UP]
    tests = bench("-p", _joined(warmed), "-n", "0") if warmed else []
    if long := [context for context in workload.contexts if context > _WARMED_UP]:
        tests += bench("-p", _joined(long), "-n", "0", "--no-warmup")
    measured.prefill = {int(test["n_prompt"]): float(test["avg_ts"]) for test in tests}
    if workload.decode:
        tests = bench("-p", "0", "-n", str(workload.decode), "-d", _joined(workload.contexts))
        measured.decode = {int(test["n_depth"]): float(test["avg_ts"]) for test in tests}
    return measured, finished


def _joined(contexts: Sequence[int]) -> str:
    return ",".join(map(str, contexts))


def start_command(setting: Setting, checkpoint: str, prompt: int, threads: int) -> list[str]:
    """Return the command of a process that loads the model and runs one prompt."""
    file = ensure_gguf(checkpoint, setting.file_type, threads=threads)
    return [*_bench_command(setting, file, threads), "-p", str(prompt), "-n", "0", "--no-warmup"]


def _bench_command(setting: Setting, file: Path, threads: int) -> list[str]:
    program = find_program("llama-bench")
    if program is None:
        raise InvalidArgumentError(f"llama-bench isn't there; set {BINARIES} to its folder")
    return [
        str(program), "-m", str(file), "-o", "json", "-r", "1", "-t", str(threads),
        "--repack", f"{setting.repack:d}", "-fa", "on" if setting.flash_attention else "off",
        "-b", str(max(2048, setting.batch)), "-ub", str(setting.batch),
    ]  # fmt: skip


def best_settings(
    trials: Sequence[tuple[Setting, Measured]], context: int, finalists: int = 2
) -> list[Setting]:
    """Return the settings worth every round: the fastest few of each phase at the context of the trials."""
    chosen: dict[Setting, None] = {}
    for phase in ("prefill", "decode"):
        ranked = sorted(trials, key=lambda trial: -getattr(trial[1], phase).get(context, 0.0))
        chosen |= dict.fromkeys(setting for setting, _ in ranked[:finalists])
    return list(chosen)
