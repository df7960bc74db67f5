"""A conversation as a chat keeps it: a system message and turns, to take back, repeat, save and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lily_py.errors import LilyError
from lily_py.text import normalise_messages

Message = dict[str, Any]


class Conversation:
    """Messages, the system's apart.

    Args:
        system: system message, or None.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, as for `Engine.chat`."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def ask(self, text: str) -> None:
        """Add a message of the user."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, message: Message) -> None:
        """Add a message of the assistant."""
        self.turns.append(message)

    def undo(self) -> str | None:
        """Take back the last question and all that followed it; return it, or None if there is none."""
        question = self._last_question()
        if question is None:
            return None
        text: str = self.turns[question]["content"]
        del self.turns[question:]
        return text

    def retry(self) -> bool:
        """Take back what followed the last question; return whether there is one."""
        question = self._last_question()
        if question is None:
            return False
        del self.turns[question + 1 :]
        return True

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def save(self, name: str) -> int:
        """Write all messages as JSON; return their number.

        Raises:
            LilyError: the file can't be written.
        """
        path = _path(name)
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise LilyError(f"{name}: can't be written ({_reason(error)})") from error
        return len(self.messages)

    def load(self, name: str) -> int:
        """Take the messages of a file: a JSON list, or an object with ``messages``; return their number.

        Raises:
            LilyError: the file can't be read, or holds something else; nothing has changed then.
        """
        path = _path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise LilyError(f"{name}: can't be read ({_reason(error)})") from error
        except (ValueError, RecursionError) as error:
            raise LilyError(f"{name}: isn't JSON ({error})") from error
        if isinstance(data, dict):
            data = data.get("messages")
        if not isinstance(data, list) or not data:
            raise LilyError(f"{name}: holds no list of messages")
        try:
            messages = normalise_messages(data)
        except LilyError as error:
            raise LilyError(f"{name}: {error}") from error
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        self.system = system
        self.turns = messages if system is None else messages[1:]
        return len(messages)

    def _last_question(self) -> int | None:
        return next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), None)


def _path(name: str) -> Path:
    """Return a typed path with its ``~`` expanded.

    Raises:
        LilyError: nobody is called so.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise LilyError(f"{name}: {error}") from error


def _reason(error: Exception) -> str:
    """Return what went wrong, without number and path."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
