"""What can be typed after ``lily``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lily_py import __version__
from lily_py.cli import chat, generate, info, selftest, tokens
from lily_py.engine import BACKENDS, KV_DTYPES
from lily_py.speculation import SPECULATIONS

_DESCRIPTION = """\
Runs Qwen3.5/3.6 hybrid mixture-of-experts models on this machine.

MODEL is 'demo' (a working miniature that ships with lily), a folder with config.json and safetensors files,
or a Hugging Face repository such as mlx-community/Qwen3.6-35B-A3B-4bit, which is downloaded once.
"""

_EPILOG = """\
examples:
  lily generate demo "What is 27 + 48?"
  lily chat demo
  lily info ~/models/Qwen3.6-35B-A3B-4bit

'lily COMMAND --help' says more about each. Exit status: 0 fine, 1 an error, 2 wrong usage, 130 Ctrl-C.
Environment: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE as everywhere, NO_COLOR, LILY_PROGRESS=0 for no progress bars.
"""

_GENERATE = """\
Answers one prompt, streaming to the terminal; prompt and generation speed and peak memory follow on stderr.
A thought is shown dimmed on a terminal; into a pipe goes the answer alone.
"""

_GENERATE_EXAMPLES = """\
examples:
  lily generate demo "Spell lily." --temp 0
  lily generate demo --json --seed 7 "Count from 3 to 9."
  git diff | lily generate MODEL --system "Review this change." -
  lily generate MODEL --raw "Once upon a time" --max-tokens 100

Sampling options that aren't given are the checkpoint's own (generation_config.json).
"""

_CHAT = """\
A conversation at the terminal. The model sees all of it in each turn, but only what is new is computed.
Ctrl-C stops an answer, Ctrl-D leaves; a line that ends with \\ goes on in the next one.
"""

_INFO = """\
Shows what a checkpoint is: architecture, bits and bytes of each kind of tensor, the memory needed at each
context length, the multi-token prediction head, and the tensors that aren't used. Reads descriptions and
headers only, so it takes a moment for any size, and works for models that this machine couldn't run.
"""

_TOKENS = """\
Shows the tokens of a text: id and piece, one a line, and their number. Of a repository only the tokenizer is
fetched. Control tokens such as <|im_end|> are ordinary characters unless --special.
"""

_SELFTEST = """\
Compiles every kernel of the GPU backend and compares small random models with the CPU backend, operation by
operation. Prints one report, which belongs into every report of a problem on a GPU; exit status 1 if
something differs.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `run` in them is a function of them, and `parser` their command's parser.

    Wrong usage raises `SystemExit(2)`.
    """
    options, rest = _make_parser().parse_known_args(arguments)
    if rest and getattr(options, "text", "") is None and (rest[0] == "-" or rest[0][:1] != "-"):
        # argparse gives up on an optional argument once an option has followed MODEL.
        options.text = rest.pop(0)
    if rest:
        text = hasattr(options, "text") and not any(word.startswith("-") for word in rest)
        options.parser.error(
            f"unrecognized arguments: {' '.join(rest)}"
            + (" (a text with spaces needs quotes)" if text else "")
        )
    return options


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lily",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lily {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        summary: str,
        description: str,
        *,
        epilog: str = "",
        text: str = "",
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            usage=f"lily {name} [options] MODEL{' [' + text + ']' if text else ''}",
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.add_argument("model", metavar="MODEL", help="'demo', a folder or a Hugging Face repository")
        added.set_defaults(run=run, parser=added)
        return added

    one = command(
        "generate", generate.run, "answer one prompt", _GENERATE, epilog=_GENERATE_EXAMPLES, text="PROMPT"
    )
    one.add_argument("text", metavar="PROMPT", nargs="?", help="the text; '-' or a pipe: read from stdin")
    one.add_argument("--raw", action="store_true", help="continue the text as it is, without chat template")
    one.add_argument(
        "--json", action="store_true", help="print the whole result as one JSON object at the end"
    )
    one.add_argument("--quiet", action="store_true", help="no figures at the end")
    _add_sampling(one)
    _add_loading(one)

    several = command(
        "chat", chat.run, "talk with a model", _CHAT, epilog=f"commands in a chat:\n{chat.HELP}"
    )
    several.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote")
    _add_sampling(several)
    _add_loading(several)

    about = command("info", info.run, "describe a checkpoint", _INFO)
    about.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    about.add_argument(
        "--download", action="store_true", help="fetch a repository that isn't here yet, whole"
    )
    _add_source(about)

    pieces = command("tokens", tokens.run, "show the tokens of a text", _TOKENS, text="TEXT")
    pieces.add_argument("text", metavar="TEXT", nargs="?", help="the text; '-' or a pipe: read from stdin")
    pieces.add_argument(
        "--ids", action="store_true", help="TEXT is token ids, such as '12 7 300': decode them"
    )
    pieces.add_argument("--special", action="store_true", help="recognise control tokens in the text")
    pieces.add_argument("--json", action="store_true", help="print one JSON object")
    pieces.add_argument("--revision", metavar="REV", help="branch, tag or commit of a repository")

    check = commands.add_parser(
        "selftest",
        help="compare the GPU with the CPU",
        description=_SELFTEST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("--backend", choices=BACKENDS, default="auto", help="what to test (default: auto)")
    check.set_defaults(run=selftest.run, parser=check)

    # Handed over before anything is parsed; it stands here to be listed.
    commands.add_parser(
        "bench", help="measure lily, its peers and the machine: lily bench --help", add_help=False
    )
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answer")

    def option(*names: str, **keywords: Any) -> None:
        group.add_argument(*names, **keywords)

    option("--system", "--system-prompt", metavar="TEXT", help="system message")
    option("--thinking", action=argparse.BooleanOptionalAction, help="ask for a thought, or for none")
    option(
        "--show-reasoning",
        action=argparse.BooleanOptionalAction,
        help="show the thought; by default on a terminal only",
    )
    option("--max-tokens", type=int, metavar="N", help="longest answer; default: what fits, at most 4096")
    option(
        "--temp", "--temperature", dest="temperature", type=float, metavar="X", help="0 takes the best token"
    )
    option("--top-p", type=float, metavar="X", help="keep the fewest tokens whose probability reaches this")
    option("--top-k", type=int, metavar="N", help="keep so many tokens; 0 is off")
    option(
        "--min-p", type=float, metavar="X", help="drop tokens below this share of the best one's probability"
    )
    option(
        "--repetition-penalty", type=float, metavar="X", help="divides logits of tokens seen before; 1 is off"
    )
    option("--presence-penalty", type=float, metavar="X", help="subtracted for tokens seen before")
    option("--frequency-penalty", type=float, metavar="X", help="subtracted each time a token was seen")
    option("--seed", type=int, metavar="N", help="same seed, same answer")
    option("--draft-tokens", type=int, metavar="N", help="most tokens drafted at once; 0: none; default: 10")
    option("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")


def _add_source(parser: Any) -> None:
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a repository")
    parser.add_argument(
        "--mtp",
        metavar="PATH",
        help="file, folder or repository with a multi-token prediction head; it is checked and loaded, "
        "but this version doesn't speculate with it",
    )


def _add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading")
    _add_source(group)
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="what computes (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")
    about = "of stored keys and values; int8 takes half the memory (default: bfloat16)"
    group.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help=about)
    about = "draft what followed the last tokens before: the same answer, sooner where text repeats (CPU)"
    group.add_argument("--speculation", choices=SPECULATIONS, help=about)
    group.add_argument("--max-context", type=int, metavar="N", help="most tokens of a conversation")
    group.add_argument("--memory-limit", metavar="SIZE", help="for weights and conversations, such as 24GB")
