"""The command line: ``lily generate``, ``chat``, ``info``, ``tokens``, ``selftest`` and ``bench``.

Exit status: 0 all went well, 1 an error of lily's (one line on stderr), 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from lily_py.cli.arguments import parse
from lily_py.cli.models import model_hint
from lily_py.cli.usage import UsageError
from lily_py.errors import CheckpointNotFoundError, LilyError

INTERRUPTED = 130
PIPE_CLOSED = 141
"""As a shell reports a program that SIGPIPE ended: the reader, such as `head`, had enough."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; wrong usage raises `SystemExit(2)`, as argparse does."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["bench"]:
        # Imported here: the benchmarks are a program of their own, which nothing else needs.
        from lily_py.bench import main as bench

        return _ended_quietly(lambda: bench(arguments[1:]))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that can't show a character mustn't end an answer.
        sys.stdout.reconfigure(errors="replace")
    options = parse(arguments)
    try:
        status = _ended_quietly(lambda: options.run(options))
    except UsageError as error:
        options.parser.error(str(error))
    except LilyError as error:
        hint = model_hint(options.model) if isinstance(error, CheckpointNotFoundError) else ""
        print(f"lily: error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        return 1
    return status


def _ended_quietly(run: Callable[[], int]) -> int:
    """Return the exit status of `run`, also where Ctrl-C or a reader that has enough ends it."""
    try:
        status = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more at exit, which mustn't fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status
