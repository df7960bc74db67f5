"""``lily bench …``: the command line of the benchmarks."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lily_py.bench import records, tables
from lily_py.bench.ablate import ABLATIONS, run_ablations
from lily_py.bench.ablate_metal import METAL_ABLATIONS, cost_table, count_ablations
from lily_py.bench.argument_types import names, numbers, positive, settings
from lily_py.bench.chips import CHIPS, find_chip
from lily_py.bench.commands import COMMANDS, Command
from lily_py.bench.concurrency import REQUEST_COUNTS, measure_concurrency
from lily_py.bench.estimate import PUBLISHED, PUBLISHED_SHAPE, estimate_report
from lily_py.bench.gguf_export import GGUF_TYPES, export_gguf
from lily_py.bench.gguf_tile import tile_gguf
from lily_py.bench.process import run_worker
from lily_py.bench.report import write_report
from lily_py.bench.roofline import Roofline, default_threads, native_roofline, thread_counts
from lily_py.bench.rows import ROW_COUNTS, measure_rows
from lily_py.bench.run import PEERS, RunOptions, run_comparison
from lily_py.bench.shapes import SHAPES, find_shape
from lily_py.bench.start import measure_start
from lily_py.bench.synthetic import make_checkpoint
from lily_py.bench.workload import Workload
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError, LilyError

_READ_KIB = (1 << 20, 8 << 10, 512)
"""KiB read by `roofline`: memory, a shared cache, a core's cache."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    options.command_line = arguments
    try:
        status: int = options.run(options)
    except LilyError as error:
        print(f"lily bench: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lily bench", description="Measure lily, its peers and the machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    make = command("make-checkpoint", _make_checkpoint, "Write a synthetic MLX 4-bit checkpoint.")
    make.add_argument("--shape", required=True, help=", ".join(SHAPES))
    make.add_argument("out", type=Path, metavar="OUT")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--force", action="store_true", help="replace a folder that isn't empty")

    export = command("export-gguf", _export_gguf, "Write a checkpoint as GGUF for llama.cpp.")
    export.add_argument("checkpoint", metavar="CHECKPOINT")
    export.add_argument("out", type=Path, metavar="OUT")
    export.add_argument("--type", choices=GGUF_TYPES, default="q4_0", help="default: q4_0, an exact repack")

    tile = command("tile-gguf", _tile_gguf, "Repeat the layers of a slice's GGUF; for speed and memory only.")
    tile.add_argument("source", type=Path, metavar="GGUF")
    tile.add_argument("out", type=Path, metavar="OUT")
    tile.add_argument("--layers", type=positive, required=True)

    run = command("run", _run, "Measure prefill and decode beside the peers.")
    _add_workload(run)
    run.add_argument("--peers", type=_peers, default=PEERS, metavar="P,…", help=_PEERS_HELP)
    run.add_argument("--llama-settings", type=settings, default=(), metavar="S,…", help=_SETTINGS_HELP)
    run.add_argument("--gguf-folder", type=Path, help="where GGUF files lie; default: beside the checkpoint")
    run.add_argument(
        "--peer-budget",
        type=float,
        default=60.0,
        metavar="S",
        help="longest time of a slow peer's figure (60 s)",
    )
    run.add_argument("--no-limits", action="store_true", help="don't measure the machine's limits")

    roofline = command(
        "roofline", _roofline, "Measure read bandwidth and the peaks of the dot-product units."
    )
    roofline.add_argument(
        "--threads", type=numbers, default=(), metavar="N,…", help="default: 1, 2, 4, … all"
    )
    roofline.add_argument("--read-kib", type=numbers, default=_READ_KIB, metavar="N,…",
                          help="sizes of what is read; the largest counts as memory")  # fmt: skip
    roofline.add_argument("--repeats", type=positive, default=7)
    roofline.add_argument("--seconds", type=float, default=0.3, help="of each repetition (default: 0.3)")
    roofline.add_argument("--priority", action="store_true", help=_PRIORITY_HELP)
    _add_save(roofline)

    rows = command("rows", _rows, "Measure several rows in one pass over the weights.")
    rows.add_argument("checkpoint", metavar="CHECKPOINT")
    rows.add_argument("--counts", type=numbers, default=ROW_COUNTS, metavar="N,…")
    rows.add_argument("--context", type=positive, default=128)
    rows.add_argument("--threads", type=positive, default=default_threads())
    rows.add_argument("--repeats", type=positive, default=20)
    _add_save(rows)

    concurrent = command("concurrent", _concurrent, "Measure several requests at once in one engine.")
    concurrent.add_argument("checkpoint", metavar="CHECKPOINT")
    concurrent.add_argument("--counts", type=numbers, default=REQUEST_COUNTS, metavar="N,…")
    concurrent.add_argument("--context", type=positive, default=128)
    concurrent.add_argument(
        "--decode", type=positive, default=64, help="tokens of each request (default: 64)"
    )
    concurrent.add_argument("--threads", type=positive, default=default_threads())
    concurrent.add_argument("--repeats", type=positive, default=5)
    _add_save(concurrent)

    for measurement in COMMANDS:
        added = command(measurement.name, partial(_measure, measurement), measurement.text)
        measurement.add_arguments(added)
        _add_save(added)

    predict = command("estimate", _estimate, "Estimate tok/s on a Mac from counted work.")
    predict.add_argument("--chip", required=True, help=", ".join(CHIPS))
    predict.add_argument("--shape", default=PUBLISHED_SHAPE, help=", ".join(SHAPES))
    predict.add_argument("--contexts", type=numbers, default=tuple(PUBLISHED), metavar="N,…")

    ablate = command("ablate", _ablate, "Measure what each optimisation is worth.")
    _add_workload(ablate)
    ablate.add_argument("--only", type=names, metavar="NAME,…", help="default: all")
    ablate.add_argument(
        "--backend", choices=("cpu", "metal"), default="cpu", help="metal counts what prompt and token take"
    )

    start = command("start", _start, "Measure a fresh process up to its first token, and its memory.")
    start.add_argument("checkpoint", metavar="CHECKPOINT")
    start.add_argument("--prompt", type=positive, default=16, help="tokens (default: 16)")
    start.add_argument("--threads", type=positive, default=default_threads())
    start.add_argument("--rounds", type=positive, default=3)
    start.add_argument("--llama-settings", type=settings, default=(), metavar="S,…")
    start.add_argument("--priority", action="store_true", help=_PRIORITY_HELP)
    _add_save(start)

    report = command("report", _report, "Make the performance page from saved results.")
    report.add_argument("folder", type=Path, metavar="FOLDER", help="what --save was given")
    report.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    return parser


_SETTINGS_HELP = "such as Q4_K_M:repack=0:fa=1:ub=512; default: try all, keep the fastest"
_PEERS_HELP = f"{', '.join(PEERS)} or none; default: all, and what isn't installed is said"
_PRIORITY_HELP = "put the measured processes before other work (Linux, as root)"


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--contexts", type=numbers, default=(128, 512, 2048), metavar="N,…")
    parser.add_argument("--decode", type=positive, default=64, help="tokens after each prompt (default: 64)")
    parser.add_argument("--rounds", type=positive, default=3, help="fresh processes of each arm (default: 3)")
    parser.add_argument("--threads", type=positive, default=default_threads())
    parser.add_argument("--priority", action="store_true", help=_PRIORITY_HELP)
    _add_save(parser)


def _add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write JSON there, and CSV and a plot")
    parser.add_argument("--name", default="", help="of the saved files")


def _peers(text: str) -> tuple[str, ...]:
    return () if text == "none" else names(text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make_checkpoint(options: argparse.Namespace) -> int:
    folder = make_checkpoint(options.shape, options.out, seed=options.seed, force=options.force)
    print(f"{folder}: {open_checkpoint(folder).nbytes / 1e6:,.1f} MB of weights")
    return 0


def _export_gguf(options: argparse.Namespace) -> int:
    types = export_gguf(open_checkpoint(options.checkpoint), options.out, options.type)
    shown = ", ".join(f"{count} {name}" for name, count in sorted(types.items()))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:,.1f} MB; tensors: {shown}")
    return 0


def _tile_gguf(options: argparse.Namespace) -> int:
    tile_gguf(options.source, options.out, options.layers)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:,.1f} MB")
    return 0


def _run(options: argparse.Namespace) -> int:
    result = run_comparison(
        _workload(options),
        RunOptions(
            peers=options.peers,
            rounds=options.rounds,
            llama_settings=options.llama_settings,
            gguf_folder=options.gguf_folder,
            peer_budget=options.peer_budget,
            priority=options.priority,
            limits=not options.no_limits,
        ),
        _say,
    )
    both = (tables.comparison_table(result), "", tables.settings_table(result), "")
    _finish(options, result, *both, *tables.limits_lines(result), *result.notes)
    changed = [context for context, found in result.digests().items() if len(found) > 1]
    if changed:
        shown = ", ".join(map(str, changed))
        raise LilyError(f"lily generated different tokens in different rounds, at context {shown}")
    return 0


def _roofline(options: argparse.Namespace) -> int:
    native_roofline()
    request = {
        "threads": options.threads or thread_counts(default_threads()),
        "sizes": [size << 10 for size in options.read_kib],
        "repeats": options.repeats,
        "seconds": options.seconds,
    }
    values, _ = run_worker("lily_py.bench.roofline_worker", request, priority=options.priority)
    result = Roofline.from_json(values)
    return _finish(options, result, tables.roofline_table(result))


def _rows(options: argparse.Namespace) -> int:
    result = measure_rows(
        options.checkpoint,
        counts=options.counts,
        context=options.context,
        threads=options.threads,
        repeats=options.repeats,
        say=_say,
    )
    return _finish(options, result, tables.rows_table(result))


def _concurrent(options: argparse.Namespace) -> int:
    result = measure_concurrency(
        options.checkpoint,
        counts=options.counts,
        context=options.context,
        decode=options.decode,
        threads=options.threads,
        repeats=options.repeats,
        say=_say,
    )
    return _finish(options, result, tables.concurrency_table(result))


def _measure(command: Command, options: argparse.Namespace) -> int:
    result = command.measure(options, _say)
    return _finish(options, result, command.table(result))


def _estimate(options: argparse.Namespace) -> int:
    print(estimate_report(find_shape(options.shape), find_chip(options.chip), options.contexts))
    return 0


def _ablate(options: argparse.Namespace) -> int:
    if options.backend == "metal":
        return _ablate_metal(options)
    names = options.only or tuple(ABLATIONS)
    if unknown := [name for name in names if name not in ABLATIONS]:
        raise InvalidArgumentError(
            f"optimisation {unknown[0]!r} isn't known; choose from {', '.join(ABLATIONS)}"
        )
    result = run_ablations(
        _workload(options),
        names=names,
        rounds=options.rounds,
        priority=options.priority,
        say=_say,
    )
    return _finish(options, result, tables.ablation_table(result))


def _ablate_metal(options: argparse.Namespace) -> int:
    if options.save is not None:
        raise InvalidArgumentError("--save keeps results of the CPU backend only; redirect the table instead")
    for context in options.contexts:
        costs = count_ablations(
            options.checkpoint,
            names=options.only or tuple(METAL_ABLATIONS),
            context=context,
            decode=options.decode,
            say=_say,
        )
        print(f"A prompt of {context} tokens:", "", cost_table(costs, "prompt"), "", sep="\n")
        print("A token after it:", "", cost_table(costs, "token"), "", sep="\n")
    return 0


def _start(options: argparse.Namespace) -> int:
    result = measure_start(
        options.checkpoint,
        prompt=options.prompt,
        threads=options.threads,
        rounds=options.rounds,
        llama_settings=options.llama_settings,
        priority=options.priority,
        say=_say,
    )
    return _finish(options, result, tables.start_table(result))


def _report(options: argparse.Namespace) -> int:
    found = records.load_folder(options.folder)
    for path in write_report(found, options.out, _shown_command(options), options.folder):
        print(path)
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(options.checkpoint, options.contexts, options.decode, options.threads)


def _finish(options: argparse.Namespace, result: records.Result, *lines: str) -> int:
    """Print a result and save it if that was asked for; returns the exit status."""
    print(*lines, sep="\n")
    if options.save is not None:
        for path in records.save(result, options.save, _shown_command(options), options.name, _say):
            print(path)
    return 0


def _shown_command(options: argparse.Namespace) -> str:
    """The command without what belongs to this machine: no absolute paths, no places for results."""
    shown: list[str] = []
    places = ("--save", "--name", "--gguf-folder", "--out")
    models = (getattr(options, "checkpoint", None), str(getattr(options, "folder", None)))
    skip = False
    for argument in options.command_line:
        if skip or argument.startswith(tuple(f"{place}=" for place in places)):
            skip = False
        elif argument in places:
            skip = True
        elif argument in models:
            path = Path(argument)
            shown.append(path.name if path.is_absolute() else argument)
        else:
            shown.append(argument)
    return f"lily bench {shlex.join(shown)}"
