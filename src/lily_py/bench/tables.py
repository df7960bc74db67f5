"""Results as Markdown tables that read well on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

from lily_py.bench.ablate import ABLATIONS, AblateResult
from lily_py.bench.concurrency import ConcurrencyResult
from lily_py.bench.roofline import Roofline
from lily_py.bench.rows import RowsResult
from lily_py.bench.run import RunResult
from lily_py.bench.start import StartResult
from lily_py.bench.workload import PHASES, Spread, short

_MISSING = "–"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip()]
    lines.append(" | ".join("-" * max(3, width) for width in widths))
    for row in rows:
        lines.append(" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def comparison_table(result: RunResult) -> str:
    """Return tokens per second of lily and of each peer's fastest setting, and lily's share of the limit."""
    peers = [program for program in result.programs if program != "lily"]
    header = ["figure", "context", "lily"]
    for peer in peers:
        header += [peer, f"lily / {peer}"]
    header += ["limit", "lily / limit"]
    rows = []
    for phase in PHASES:
        for context in result.workload.contexts:
            mine = result.best("lily", phase, context)
            row = [f"{phase}, tok/s", f"{context:,}", str(mine[0]) if mine else _MISSING]
            for peer in peers:
                theirs = result.best(peer, phase, context)
                row.append(f"{theirs[0]} {theirs[1]}".strip() if theirs else _MISSING)
                row.append(_ratio(result.advantage(peer, phase, context)))
            limit = result.limits.rate(phase, context) if result.limits else None
            row.append(short(limit) if limit else _MISSING)
            row.append(f"{mine[0].median / limit:.0%}" if limit and mine else _MISSING)
            rows.append(row)
    return markdown_table(header, rows)


def settings_table(result: RunResult) -> str:
    """Return tokens per second of every arm, and of every trial."""
    rows = []
    for arm in result.arms:
        for phase in PHASES:
            cells = [arm.spread(phase, context) for context in result.workload.contexts]
            rows.append([arm.name, f"{phase}, tok/s", *(str(cell) if cell else _MISSING for cell in cells)])
    for name, trial in result.trials.items():
        for phase in PHASES:
            rates = trial.rates(phase)
            if not set(rates) & set(result.workload.contexts):
                continue
            cells_text = [
                short(rates[context]) if context in rates else _MISSING
                for context in result.workload.contexts
            ]
            rows.append([f"{name} (trial)", f"{phase}, tok/s", *cells_text])
    contexts = [f"at {context:,}" for context in result.workload.contexts]
    return markdown_table(["arm", "figure", *contexts], rows)


def limits_lines(result: RunResult) -> list[str]:
    """Say what the limits of a run are made of."""
    limits, cost = result.limits, result.cost
    if limits is None or cost is None:
        return []
    threads = result.workload.threads
    first = min(result.workload.contexts)
    return [
        f"Decoding after {first:,} tokens moves {cost.decode_bytes(first) / 1e9:.3f} GB a token "
        f"({cost.weight_bytes / 1e9:.3f} GB of weights, {cost.state_bytes / 1e6:.1f} MB of recurrent state, "
        f"{cost.kv_bytes / 1e3:.1f} kB of keys and values a position); the limit is that at "
        f"{limits.roofline.bandwidth / 1e9:.1f} GB/s, read by {threads} threads.",
        f"A prompt token takes {cost.prompt_operations / 1e9:.3f} G operations in weight matrices; the limit "
        f"is that at {limits.roofline.peak(limits.unit) / 1e9:.0f} Gop/s of {limits.unit} "
        f"({limits.roofline.descriptions[limits.unit]}), the unit of lily's kernels here, {threads} threads.",
    ]


def roofline_table(roofline: Roofline) -> str:
    """Return bandwidths and peaks by thread count."""
    header = ["limit", *(f"{count} thread{'s' if count > 1 else ''}" for count in roofline.threads), "unit"]
    rows = []
    for size, by_threads in sorted(roofline.reads.items(), reverse=True):
        name = f"read, {size / (1 << 20):,.4g} MiB"
        rows.append([name, *(_scaled(by_threads.get(count)) for count in roofline.threads), "GB/s"])
    for unit, by_threads in roofline.units.items():
        name = f"{unit}: {roofline.descriptions[unit]}"
        rows.append([name, *(_scaled(by_threads.get(count)) for count in roofline.threads), "Gop/s"])
    return markdown_table(header, rows)


def concurrency_table(result: ConcurrencyResult) -> str:
    """Return the decoding speed of several requests at once."""
    header = ["requests", "together, tok/s", "each, tok/s", "rows a pass"]
    rows = [
        [str(count), f"{speed:.1f}", f"{speed / count:.1f}", f"{result.rows_per_pass[count]:.2f}"]
        for count, speed in result.tokens_per_second.items()
    ]
    return markdown_table(header, rows)


def rows_table(result: RowsResult) -> str:
    """Return the cost of several rows in one pass, in all and relative to one row."""
    header = ["rows", "sequences, ms", "relative", "a row", "tokens of one sequence, ms", "relative", "a row"]
    rows = []
    for count in result.sequences:
        row = [str(count)]
        for table in (result.sequences, result.tokens):
            spread, single = table[count], table[min(table)]
            milliseconds = Spread(spread.median * 1e3, spread.low * 1e3, spread.high * 1e3, spread.count)
            relative = spread.median / single.median
            row += [str(milliseconds), f"{relative:.2f}", f"{relative / count:.2f}"]
        rows.append(row)
    return markdown_table(header, rows)


def ablation_table(result: AblateResult) -> str:
    """Return what each optimisation is worth: rate with it over rate without it."""
    contexts = result.workload.contexts
    header = ["optimisation", *(f"{phase} at {context:,}" for phase in PHASES for context in contexts)]
    rows = []
    for name in result.arms:
        if not name:
            cells = [str(result.arms[""].spread(phase, c) or _MISSING) for phase in PHASES for c in contexts]
            rows.append(["everything on, tok/s", *cells])
            continue
        effects = [result.effect(name, phase, context) for phase in PHASES for context in contexts]
        label = f"`{name}`: {ABLATIONS.get(name, name)}"
        rows.append([label, *(f"{effect:.2f}x" if effect else _MISSING for effect in effects)])
    return markdown_table(header, rows)


def start_table(result: StartResult) -> str:
    """Return the seconds of a fresh process, step by step, and its memory."""
    names = {
        "imports": "interpreter and imports",
        "load": "opening the checkpoint and building the model",
        "prompt": f"prompt of {result.prompt} tokens to the first token",
        "first token": "from the start of the process to the first token",
        "process": "whole process",
    }
    rows = [[f"lily: {names[step]}", f"{spread} s"] for step, spread in result.seconds.items()]
    rows += [[f"{name}: whole process", f"{spread} s"] for name, spread in result.peers.items()]
    rows += [[f"lily: {kind} memory", f"{size / 1e9:.3f} GB"] for kind, size in result.memory.items()]
    rows.append(["checkpoint", f"{result.weight_bytes / 1e9:.3f} GB"])
    return markdown_table(["figure", "value"], rows)


def _ratio(ratios: Spread | None) -> str:
    if ratios is None:
        return _MISSING
    text = f"{ratios.median:.2f}x"
    return text if ratios.count == 1 else f"{text} [{ratios.low:.2f}..{ratios.high:.2f}]"


def _scaled(spread: Spread | None) -> str:
    if spread is None:
        return _MISSING
    return str(Spread(spread.median / 1e9, spread.low / 1e9, spread.high / 1e9, spread.count))
