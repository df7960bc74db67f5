"""``lily bench conversation``, ``states``, ``profile``, ``speculation``: each has arguments of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily_py.bench import conversation, profile, speculation, states
from lily_py.bench.argument_types import numbers, positive, settings
from lily_py.bench.arms import Say
from lily_py.bench.roofline import default_threads
from lily_py.bench.tables import markdown_table


@dataclass(frozen=True)
class Command:
    """A measurement with its own arguments.

    Attributes:
        name: of the command.
        text: what it does.
        add_arguments: declares its arguments, but for those on saving.
        measure: runs it.
        table: shows its result.
    """

    name: str
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Say], Any]
    table: Callable[[Any], str]


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--threads", type=positive, default=default_threads())
    parser.add_argument(
        "--priority",
        action="store_true",
        help="put the measured processes before other work (Linux, as root)",
    )


def _add_conversation(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--turns", type=numbers, default=conversation.TURNS, metavar="N,…")
    parser.add_argument("--grow", type=positive, default=500, help="tokens that a turn adds (default: 500)")
    parser.add_argument("--answer", type=positive, default=32, help="of them the answer's (default: 32)")
    parser.add_argument("--rounds", type=positive, default=3, help="fresh processes of each arm (default: 3)")
    parser.add_argument(
        "--llama-settings",
        type=settings,
        default=(),
        metavar="S,…",
        help="of llama.cpp's server, such as Q4_0:repack=1:fa=1:ub=512; default: not measured",
    )
    parser.add_argument(
        "--gguf-folder", type=Path, help="where GGUF files lie; default: beside the checkpoint"
    )


def _measure_conversation(options: argparse.Namespace, say: Say) -> conversation.ConversationResult:
    return conversation.measure_conversation(
        options.checkpoint,
        turns=options.turns,
        grow=options.grow,
        answer=options.answer,
        threads=options.threads,
        rounds=options.rounds,
        llama_settings=options.llama_settings,
        gguf_folder=options.gguf_folder,
        priority=options.priority,
        say=say,
    )


def _add_states(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--contexts", type=numbers, default=states.CONTEXTS, metavar="N,…")
    parser.add_argument("--repeats", type=positive, default=10)


def _measure_states(options: argparse.Namespace, _: Say) -> states.StatesResult:
    return states.measure_states(
        options.checkpoint,
        contexts=options.contexts,
        threads=options.threads,
        repeats=options.repeats,
        priority=options.priority,
    )


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--contexts", type=numbers, default=profile.CONTEXTS, metavar="N,…")
    parser.add_argument("--decode", type=positive, default=64, help="tokens after each prompt (default: 64)")


def _measure_profile(options: argparse.Namespace, _: Say) -> profile.ProfileResult:
    return profile.measure_profile(
        options.checkpoint,
        contexts=options.contexts,
        decode=options.decode,
        threads=options.threads,
        priority=options.priority,
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--context", type=positive, default=400, help="tokens of the prompt (default: 400)")
    parser.add_argument("--decode", type=positive, default=300, help="tokens after it (default: 300)")
    parser.add_argument("--repeats", type=positive, default=3)


def _measure_speculation(options: argparse.Namespace, _: Say) -> speculation.SpeculationResult:
    return speculation.measure_speculation(
        options.checkpoint,
        context=options.context,
        decode=options.decode,
        threads=options.threads,
        repeats=options.repeats,
        priority=options.priority,
    )


def profile_tables(result: profile.ProfileResult) -> str:
    """Return a table for each context and phase."""
    parts = [profile.describe_profile(result)]
    for context, costs in result.decode.items():
        prompt = markdown_table(*profile.profile_rows(result.prefill[context], reading=False))
        token = markdown_table(*profile.profile_rows(costs, reading=True))
        parts += [f"A prompt of {context:,} tokens:", prompt, f"A decoded token after {context:,}:", token]
    return "\n\n".join(parts)


def conversation_table(result: conversation.ConversationResult) -> str:
    """Return milliseconds to the first token by turn."""
    return markdown_table(*conversation.conversation_rows(result))


def states_table(result: states.StatesResult) -> str:
    """Return milliseconds by operation and length."""
    return markdown_table(*states.states_rows(result))


def speculation_table(result: speculation.SpeculationResult) -> str:
    """Return tokens per second with and without drafts, by text."""
    return markdown_table(*speculation.speculation_rows(result))


COMMANDS = (
    Command(
        "conversation",
        "Measure the time to the first token as a conversation grows.",
        _add_conversation,
        _measure_conversation,
        conversation_table,
    ),
    Command(
        "states",
        "Measure snapshots, forks, saving and loading of sessions.",
        _add_states,
        _measure_states,
        states_table,
    ),
    Command(
        "profile",
        "Measure what each kind of operation takes on the CPU backend.",
        _add_profile,
        _measure_profile,
        profile_tables,
    ),
    Command(
        "speculation",
        "Measure decoding with drafts by prompt lookup, on texts that repeat more or less.",
        _add_speculation,
        _measure_speculation,
        speculation_table,
    ),
)
