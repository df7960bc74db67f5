"""A session in a file: its tokens, its messages and the state that covers them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from lily_py import _core
from lily_py.errors import InvalidArgumentError, SavedStateError
from lily_py.identity import require_identity
from lily_py.state import State
from lily_py.state_file import Bytes, discard_partial, read_state_file, write_state_file

_KIND = "session"


@dataclass(frozen=True)
class Conversation:
    """What a session holds beside its state: messages, and the template's arguments."""

    messages: list[Any]
    template: dict[str, Any]


def save_session(path: Path, identity: Mapping[str, Any], state: State, conversation: Conversation) -> None:
    """Write a session's file, replacing an older one in one step; behind a link, what it points to.

    Raises:
        InvalidArgumentError: messages that JSON has no form for; a path that can't be written.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # a device, for instance, mustn't be replaced
        raise InvalidArgumentError(f"{path}: the session can't be saved there, it isn't a file")
    try:
        text = json.dumps({"messages": conversation.messages, "template": conversation.template})
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the session can't be saved: JSON has no form for its messages or tools ({error})"
        ) from error
    prefix, earlier, logits = state.export()
    blocks: list[tuple[str, NDArray[Any]]] = [
        ("conversation", numpy.frombuffer(text.encode(), numpy.uint8)),
        ("tokens", numpy.array(state.tokens, numpy.int32)),
    ]
    if prefix is not None:
        blocks += [(f"page {number}", page) for number, page in enumerate(prefix.pages())]
        blocks.append(("recurrent", prefix.recurrent()))
    blocks += [(f"snapshot {length}", recurrent) for length, recurrent in earlier]
    if logits is not None:
        blocks.append(("logits", logits))
    meta = {"tokens": len(state.tokens), "covered": state.covered, "snapshots": [at for at, _ in earlier]}
    try:
        discard_partial(path)
        write_state_file(path, _KIND, identity, meta, blocks)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: the session can't be saved there ({error})") from error


class SavedSession:
    """A session's file, read and checked.

    Args:
        path: of the file.
        identity: of the loaded model, which must have saved it.

    Raises:
        FileNotFoundError: there is none.
        SavedStateError: it is damaged, or belongs to another model or setting; names what differs.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        header, self._blocks = read_state_file(path, _KIND)
        require_identity(header.identity, identity, str(path))
        self._path = path
        try:
            text = json.loads(self._blocks["conversation"].tobytes())
            self.conversation = Conversation(list(text["messages"]), dict(text["template"]))
            if not all(isinstance(message, dict) for message in self.conversation.messages):
                raise ValueError("a message that is none")
            if self.conversation.template.keys() != {"tools", "thinking", "template_variables"}:
                raise ValueError("unknown arguments of the template")
            self.tokens: list[int] = self._blocks["tokens"].view(numpy.int32).tolist()
            self._covered = int(header.meta["covered"])
            self._snapshots = [int(length) for length in header.meta["snapshots"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise SavedStateError(f"{path}: damaged: {error!r}") from error

    def restore(self, model: _core.Model, state: State) -> None:
        """Bring the saved state into `state`.

        Raises:
            SavedStateError: the pieces don't fit the model.
        """
        logits = self._blocks.get("logits")
        try:
            known = None if logits is None else logits.view(numpy.float32)
            state.adopt(self.tokens, self._sequence(model), known)
        except (KeyError, ValueError) as error:
            raise SavedStateError(f"{self._path}: damaged: {error}") from error

    def _sequence(self, model: _core.Model) -> _core.Sequence | None:
        if self._covered == 0:
            return None
        tokens = numpy.array(self.tokens[: self._covered], numpy.int32)
        if len(tokens) != self._covered:
            raise ValueError(f"{self._covered} tokens are computed, {len(tokens)} are there")
        count = sum(name.startswith("page ") for name in self._blocks)
        pages: list[Bytes] = [self._blocks[f"page {number}"] for number in range(count)]
        prefix = _core.restore_prefix(model, tokens, pages, self._blocks["recurrent"])
        earlier = [(length, self._blocks[f"snapshot {length}"]) for length in self._snapshots]
        return _core.restore_sequence(prefix, earlier)
