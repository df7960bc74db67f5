"""The performance page, from saved results: ``docs/performance.md``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lily_py.bench import tables
from lily_py.bench.ablate import AblateResult
from lily_py.bench.commands import (
    conversation_table,
    profile_tables,
    speculation_table,
    states_table,
)
from lily_py.bench.concurrency import ConcurrencyResult
from lily_py.bench.conversation import ConversationResult, describe_conversation
from lily_py.bench.plot import plot_run
from lily_py.bench.profile import ProfileResult
from lily_py.bench.records import Record
from lily_py.bench.roofline import Roofline
from lily_py.bench.rows import RowsResult
from lily_py.bench.run import RunResult
from lily_py.bench.speculation import SpeculationResult
from lily_py.bench.start import StartResult
from lily_py.bench.states import StatesResult, describe_states
from lily_py.bench.workload import short

_INTRODUCTION = """\
Measured with `lily bench`; this page is made from the saved results by `{command}`.

Figures are medians of fresh processes with [lowest..highest] behind them; one request at a time. Prefill is
the prompt's tokens over the time to the first token, decode the tokens after the first over their time. Every
process first does the same work once to warm up. Rounds alternate the order of the programs; ratios are
medians of the rounds' own. Weights named
after a shape (`35b-a3b`, …) are synthetic, with the published sizes and number formats: speed and memory mean
something, text doesn't. Peers run the same weights, each at the fastest of the settings that were tried."""


def write_report(records: Sequence[Record], path: Path, command: str, picture_folder: Path) -> list[Path]:
    """Write the page and the pictures it shows, and return the files.

    Args:
        command: that regenerates the page.
        picture_folder: where pictures go; the page links to them.

    Raises:
        InvalidArgumentError: matplotlib isn't installed.
    """
    parts = ["# Performance", _INTRODUCTION.format(command=command), "## Machine", _machine(records)]
    written = [path]
    for record in records:
        result = record.result
        if isinstance(result, Roofline):
            parts += ["## Limits of the machine", tables.roofline_table(result)]
        elif isinstance(result, RunResult):
            picture = plot_run(result, picture_folder / f"{record.name}.png")
            written.append(picture)
            parts += _run(result, os.path.relpath(picture, path.parent))
        elif isinstance(result, ConcurrencyResult):
            title = f"{result.checkpoint}: several requests at once, {_threads(result.threads)}"
            text = f"Each decodes {result.decode} tokens after a prompt of {result.context}."
            parts += [f"## {title}", text, tables.concurrency_table(result)]
        elif isinstance(result, RowsResult):
            title = f"{result.checkpoint}: several rows in one pass, {_threads(result.threads)}"
            parts += [f"## {title}", f"After {result.context} tokens of context.", tables.rows_table(result)]
        elif isinstance(result, AblateResult):
            title = f"{result.checkpoint}: what each optimisation is worth"
            parts += [f"## {title}", "Rate with it over rate without it.", tables.ablation_table(result)]
        elif isinstance(result, ConversationResult):
            title = f"{result.checkpoint}: the next turn of a conversation, {_threads(result.threads)}"
            parts += [f"## {title}", describe_conversation(result), conversation_table(result)]
            parts += [f"- {note}" for note in result.notes]
        elif isinstance(result, StatesResult):
            title = f"{result.checkpoint}: what states cost, {_threads(result.threads)}"
            parts += [f"## {title}", describe_states(result), states_table(result)]
        elif isinstance(result, ProfileResult):
            title = f"{result.checkpoint}: where the time goes, {_threads(result.threads)}"
            parts += [f"## {title}", profile_tables(result)]
        elif isinstance(result, SpeculationResult):
            title = f"{result.checkpoint}: drafts by prompt lookup, {_threads(result.threads)}"
            text = f"{result.decode} tokens after a prompt of {result.context}."
            parts += [f"## {title}", text, speculation_table(result)]
        elif isinstance(result, StartResult):
            parts += [f"## {result.checkpoint}: from nothing to the first token", tables.start_table(result)]
            parts += [f"- {note}" for note in result.notes]
        parts.append(f"```\n{record.command}\n```")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")
    return written


def _machine(records: Sequence[Record]) -> str:
    lines = []
    for machine in {str(sorted(record.machine.items())): record.machine for record in records}.values():
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        lines.append(
            f"- {machine['date']}: {machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / (1 << 30):.1f} GiB, {machine['system']}, "
            f"Python {machine['python']}; {versions}"
        )
    return "\n".join(lines)


def describe_rounds(result: RunResult) -> str:
    """Say what a comparison did, how busy the machine was, and whether lily's tokens repeated."""
    rounds = max(len(arm.rounds) for arm in result.arms)
    foreign = [cores for arm in result.arms for cores in arm.foreign_cores if cores is not None]
    work = result.workload
    facts = [
        f"{result.weight_bytes / 1e9:.2f} GB of weights, {_threads(work.threads)}, "
        f"{rounds} round{'' if rounds == 1 else 's'}, "
        f"{work.decode} tokens decoded after each prompt."
    ]
    if foreign:
        facts.append(f"Other processes kept up to {max(foreign):.2f} cores busy meanwhile.")
    if all(len(found) == 1 for found in result.digests().values()):
        facts.append("lily generated the same tokens in every round.")
    else:
        facts.append("**lily generated different tokens in different rounds.**")
    builds = {str(r.facts["build"]) for arm in result.arms for r in arm.rounds if "build" in r.facts}
    if builds:
        facts.append(f"llama.cpp is build {', '.join(sorted(builds))}.")
    return " ".join(facts)


def _run_title(result: RunResult) -> str:
    work = result.workload
    peers = sorted({arm.program for arm in result.arms} - {"lily"})
    company = f"beside {' and '.join(peers)}" if peers else "alone"
    contexts = ", ".join(f"{context:,}" for context in work.contexts)
    return f"{result.checkpoint} {company}, {_threads(work.threads)}, context {contexts}"


def _run(result: RunResult, picture: str) -> list[str]:
    parts = [
        f"## {_run_title(result)}",
        describe_rounds(result),
        f"![Tokens per second against context]({picture})",
        tables.comparison_table(result),
        " ".join(tables.limits_lines(result)),
        "Every arm:",
        tables.settings_table(result),
        "\n".join(f"- {note}" for note in result.notes),
        _memory(result),
    ]
    return [part for part in parts if part]


def _memory(result: RunResult) -> str:
    for arm in result.arms:
        if arm.program == "lily" and arm.rounds and "memory" in arm.rounds[-1].facts:
            memory = arm.rounds[-1].facts["memory"]
            shown = ", ".join(f"{kind} {short(size / 1e9)} GB" for kind, size in memory.items())
            return f"lily's memory after the last context: {shown}."
    return ""


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
