"""``lily chat``: a conversation at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Callable

from lily_py.cli.conversation import Conversation
from lily_py.cli.models import load_engine
from lily_py.cli.terminal import AnswerPrinter, Statistics, notice
from lily_py.cli.usage import sampling_keywords
from lily_py.engine import Engine
from lily_py.errors import ContextLengthError, LilyError

HELP = """\
  /help              this list
  /reset             forget the conversation; the system message stays
  /save FILE         write the conversation as JSON
  /load FILE         go on with a saved conversation
  /think on|off      ask for thoughts, or for none; /think auto leaves it to the template
  /system TEXT       set the system message; without TEXT: remove it
  /retry             answer the last message anew
  /undo              take back the last message and its answer
  /stats             tokens, speed and memory so far
  /exit              leave (Ctrl-D does, too)
  //TEXT             a message that begins with a slash"""

_THINKING = {"on": True, "off": False, "auto": None}


def run(options: argparse.Namespace) -> int:
    """Talk until the user leaves; return the exit status."""
    conversation = Conversation(options.system)
    if options.load is not None:
        conversation.load(options.load)
        if options.system is not None:
            conversation.system = options.system
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not every Python has it; lines are then edited plainly
            import readline  # noqa: F401
    with load_engine(options) as engine:
        Chat(engine, conversation, options).talk()
    return 0


class Chat:
    """Reads lines, obeys commands, prints answers.

    Args:
        engine: the model.
        conversation: what it goes on with.
        options: of the command line.
    """

    def __init__(self, engine: Engine, conversation: Conversation, options: argparse.Namespace) -> None:
        self._engine = engine
        self._conversation = conversation
        self._keywords = sampling_keywords(options)
        self._reasoning: bool | None = options.show_reasoning
        self._model: str = options.model
        self._statistics = Statistics()
        self._held = 0
        self._open = True
        self._interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: notice(HELP),
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
            "think": self._think,
            "system": self._system,
            "retry": self._retry,
            "undo": self._undo,
            "stats": self._stats,
            "exit": self._exit,
            "quit": self._exit,
        }

    def talk(self) -> None:
        """Go on until the user leaves."""
        if self._interactive:
            context = self._engine.info().context
            notice(f"{self._model}, context {context:,} tokens. /help lists commands, Ctrl-D leaves.")
        while self._open:
            try:
                line = self._read()
                if line is None:
                    break
                self._obey(line)
            except KeyboardInterrupt:
                notice("\nCtrl-D or /exit leaves.")
            except LilyError as error:
                notice(f"lily: error: {error}")
        if self._interactive and self._open:
            notice("")
        if self._statistics.generated_tokens:
            self._statistics.show()

    def _read(self) -> str | None:
        """Return what the user typed, continued lines joined; None at the end of input."""
        lines: list[str] = []
        prompt = "> "
        while True:
            try:
                line = input(prompt if self._interactive else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            except UnicodeDecodeError as error:
                raise LilyError(f"the input isn't {error.encoding} text") from error
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
            prompt = "... "

    def _obey(self, line: str) -> None:
        """Do what a line says: a command, or a message to answer."""
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            command = self._commands.get(name.strip())
            if command is None:
                nearest = difflib.get_close_matches(name, self._commands, 1)
                meant = f"did you mean /{nearest[0]}?" if nearest else "/help lists them"
                notice(f"unknown command /{name}: {meant}")
            else:
                command(argument.strip())
        elif line.strip():
            self._conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
            self._answer()

    def _answer(self) -> None:
        """Let the model answer the conversation; Ctrl-C keeps what it said so far."""
        printer = AnswerPrinter(sys.stdout, self._reasoning)
        interrupted = False
        try:
            with self._engine.stream(self._conversation.messages, **self._keywords) as stream:
                try:
                    for chunk in stream:
                        printer.feed(chunk)
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    printer.end()
        except BaseException as error:
            self._conversation.undo()
            notice("the message is taken back")
            if isinstance(error, ContextLengthError):
                notice("the conversation is full: /undo, /reset or a larger --max-context make room")
            raise
        result = stream.result
        self._statistics.add(result)
        self._held = result.usage.total_tokens
        if not result.token_ids:
            self._conversation.undo()
            notice("stopped before the answer began; the message is taken back")
            return
        self._conversation.answer(result.message)
        if interrupted:
            notice("stopped; /retry answers anew, /undo takes the message back")
        elif result.finish_reason == "length":
            notice(f"cut off after {result.usage.completion_tokens} tokens")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._held = 0
        notice("forgotten")

    def _save(self, argument: str) -> None:
        if not argument:
            notice("/save needs a file name")
            return
        count = self._conversation.save(argument)
        notice(f"saved {count} messages to {argument}")

    def _load(self, argument: str) -> None:
        if not argument:
            notice("/load needs a file name")
            return
        count = self._conversation.load(argument)
        notice(f"loaded {count} messages from {argument}")

    def _think(self, argument: str) -> None:
        if argument in _THINKING:
            self._keywords["thinking"] = _THINKING[argument]
        elif argument:
            notice(f"/think takes on, off or auto, not {argument!r}")
            return
        state = next(name for name, value in _THINKING.items() if value is self._keywords["thinking"])
        notice(f"thinking: {state}")

    def _system(self, argument: str) -> None:
        self._conversation.system = argument or None
        notice("system message set" if argument else "no system message")

    def _retry(self, _: str) -> None:
        if self._conversation.retry():
            self._answer()
        else:
            notice("there is nothing to answer yet")

    def _undo(self, _: str) -> None:
        question = self._conversation.undo()
        notice("there is nothing to take back" if question is None else f"taken back: {question}")

    def _stats(self, _: str) -> None:
        self._statistics.show()
        notice(f"Context: {self._held} of {self._engine.info().context} tokens after the last answer")

    def _exit(self, _: str) -> None:
        self._open = False
