"""Fresh processes for measurements, and how much of the machine others used meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily_py.checkpoint import open_checkpoint
from lily_py.errors import LilyError


class ArmError(LilyError, RuntimeError):
    """A measured process failed; the message holds the end of what it said."""


@dataclass(frozen=True)
class Finished:
    """A process that ended well.

    Attributes:
        output: what it wrote.
        seconds: from start to end.
        foreign_cores: cores that other processes kept busy meanwhile; None where it can't be told.
    """

    output: str
    seconds: float
    foreign_cores: float | None


def run_process(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, priority: bool = False
) -> Finished:
    """Run a command to its end.

    Args:
        environment: variables added to this process's own.
        priority: put it before other users' work (Linux, as root: nice -15 of its own autogroup).

    Raises:
        ArmError: it couldn't be started or failed.
    """
    before, children, start = _busy_seconds(), _children_seconds(), time.perf_counter()
    try:
        process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=priority,
        )
    except OSError as error:
        raise ArmError(f"{command[0]}: can't be started ({error.strerror or error})") from error
    with process:
        if priority:
            _prefer(process.pid)
        output, errors = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode:
        raise ArmError(
            f"{' '.join(command)}: failed with status {process.returncode}: {errors.strip()[-800:]}"
        )
    own = _children_seconds() - children
    busy = _busy_seconds()
    foreign = None if busy is None or before is None else max(0.0, busy - before - own) / seconds
    return Finished(output, seconds, foreign)


def run_worker(module: str, request: Mapping[str, Any], *, priority: bool = False) -> tuple[Any, Finished]:
    """Run ``python -m module`` with a request as JSON and return the JSON on its last line.

    The worker finds lily where this process found it.
    """
    package = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = run_process(
        [sys.executable, "-m", module, json.dumps(request)],
        environment={"PYTHONPATH": path},
        priority=priority,
    )
    return json.loads(finished.output.strip().splitlines()[-1]), finished


def run_checkpoint_worker(
    module: str, checkpoint: str, request: Mapping[str, Any], *, priority: bool = False
) -> Any:
    """Run a worker that opens a checkpoint, asked for under "checkpoint", and return its answer.

    Raises:
        CheckpointError: the checkpoint can't be opened; said before a worker is started.
        ArmError: the process failed.
    """
    open_checkpoint(checkpoint)
    answer, _ = run_worker(module, {"checkpoint": checkpoint, **request}, priority=priority)
    return answer


def _prefer(pid: int) -> None:
    """Nice values only count within an autogroup, so the group itself is moved."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-15")


def _busy_seconds() -> float | None:
    """CPU seconds that all cores have spent on work, or None where there is no /proc."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft = (int(value) for value in fields[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident_bytes() -> dict[str, int]:
    """Return this process's resident memory: in all, its own, and mapped from files (Linux), or its peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak": peak if sys.platform == "darwin" else peak * 1024}
    kinds = {"VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped", "VmHWM": "peak"}
    found = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key in kinds:
            found[kinds[key]] = int(value.split()[0]) * 1024
    return found
