"""A conversation that the caller owns: it grows, goes back, branches."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from lily_py.errors import ContextLengthError, InvalidArgumentError, LilyError
from lily_py.generation import Generation
from lily_py.progress import shown
from lily_py.prompts import Prompt, PromptLike
from lily_py.results import Result
from lily_py.runtime import PROMPT_NAMES, Request, Runtime
from lily_py.sampling import boolean, integer
from lily_py.saved_session import Conversation, SavedSession, save_session
from lily_py.state import Logits, Progress, State
from lily_py.state_file import checked_path
from lily_py.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily_py.sampling import Keywords

Message = Mapping[str, Any]


class Session:
    """One conversation and its state, which always equals its tokens.

    A session holds either plain tokens or messages, as the first `append`, `generate` or `stream` decides.
    With messages, the template writes the whole conversation anew each time, and what differs from before is
    computed again from the nearest snapshot.

    Made by `Engine.new_session`; usable from any thread, by one at a time.

    Args:
        runtime: of the engine.
        tools: for the template, in every turn.
        thinking: as for `Engine.chat`, in every turn.
        template_variables: as for `Engine.chat`, in every turn.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        tools: Sequence[Message] | None = None,
        thinking: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        if thinking is not None:
            thinking = boolean("thinking", thinking)
        self._runtime = runtime
        self._template: dict[str, Any] = {
            "tools": copy.deepcopy(tools),
            "thinking": thinking,
            "template_variables": copy.deepcopy(template_variables),
        }
        self._messages: list[Message] = []
        self._state: State | None = runtime.new_state()
        self._lock = threading.Lock()
        self._stream: weakref.ref[Stream] | None = None
        """Of the answer that is being made; whoever drops the stream ends it."""
        self._busy = False
        self._guard = threading.Lock()
        """Held for a moment, so that nobody looks at the state while it begins to change."""
        runtime.holders.add(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError("a Session can't be pickled or copied: fork() it, or save() and load() it")

    def __len__(self) -> int:
        return len(self._open_state().tokens)

    def __repr__(self) -> str:
        if self._state is None:
            return "Session(closed)"
        kind = f"{len(self._messages)} messages, " if self._messages else ""
        return f"Session({kind}{len(self._state.tokens)} tokens)"

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation."""
        return list(self._open_state().tokens)

    @property
    def messages(self) -> list[Message]:
        """The conversation's messages, answers included; empty for a session of plain tokens."""
        return copy.deepcopy(self._messages)

    def append(self, content: PromptLike, *, progress: bool | Progress | None = None) -> None:
        """Add to the conversation and compute it, so that an answer can begin at once.

        Args:
            content: token ids; text, added as it is; or messages.
            progress: called with (done, total) after each chunk; a bar for True, and for None where a person
                watches and it takes long.

        Raises:
            InvalidArgumentError: messages to a session of tokens, or the other way round; empty content.
            ContextLengthError: it wouldn't fit.
        """
        with self._exclusive() as state:
            before = list(state.tokens)
            messages = self._as_messages(content)
            if messages is not None:
                conversation = [*self._messages, *messages]
                tokens = self._runtime.reader.render_begun(conversation, **self._template)
            else:
                conversation = self._messages
                tokens = [*before, *self._runtime.reader.read(content, raw=isinstance(content, str)).tokens]
            self._check_room(len(tokens))
            reserved = self._runtime.budget.admit(len(tokens))
            try:
                state.restart(tokens)
                turns = () if messages is None else self._runtime.reader.marks(tokens)
                # The one before the end lets others that hold the same cost one step.
                marks = (*turns, len(tokens) - 1)
                with shown(self._runtime.read_progress(progress)) as callback:
                    state.advance(progress=callback, marks=marks)
                state.snapshot()
            except BaseException:
                state.restore(before)
                raise
            finally:
                self._runtime.budget.release(reserved)
            self._messages = list(conversation)

    def logits(self) -> Logits:
        """Return the logits [vocab], float32, of the token that would come next.

        Raises:
            InvalidArgumentError: there are no tokens yet.
        """
        with self._exclusive() as state:
            if not state.tokens:
                raise InvalidArgumentError("the session has no tokens yet; append some first")
            logits = state.advance()
            assert logits is not None
            result: Logits = logits.copy()
            return result

    def generate(self, prompt: PromptLike | None = None, **keywords: Unpack[Keywords]) -> Result:
        """Answer, and add the answer to the conversation.

        Args:
            prompt: appended first: token ids, messages, or a text, which is a user message in a session of
                messages (or an empty one, if the checkpoint has a template). None goes on from what there is.
            **keywords: as for `Engine.generate`, but for `n`.
        """
        return self.stream(prompt, **keywords).finish()

    def stream(self, prompt: PromptLike | None = None, **keywords: Unpack[Keywords]) -> Stream:
        """Answer as a stream; arguments as for `generate`.

        What was generated when the stream ends is part of the conversation, even if it was cancelled.
        """
        started = time.perf_counter()
        options, progress = self._runtime.read_keywords(keywords)
        if options.n != 1:
            raise InvalidArgumentError(f"n must be 1 in a session, got {options.n}; fork it for more answers")
        self._begin()
        state = self._open_state()
        before = list(state.tokens)
        try:
            conversation, read = self._prompt(prompt, keywords)
            options = self._runtime.settle_length(options, len(read.tokens))
            cached = state.restart(read.tokens)
            request = Request(read, options, progress)

            def end(generation: Generation) -> None:
                self._messages = conversation
                if read.chat:
                    self._messages = [*conversation, generation.result().message]
                self._stream = None
                try:
                    state.snapshot()
                finally:
                    self._end()

            stream = self._runtime.open_stream(state, request, cached=cached, started=started, on_end=end)
            self._stream = weakref.ref(stream)
            return stream
        except BaseException:
            state.restore(before)
            self._end()
            raise

    def rewind(self, to: int | None = None, *, messages: int | None = None) -> None:
        """Go back to an earlier point; what no snapshot covers is computed again when it is needed.

        Args:
            to: tokens to keep. A session of messages becomes one of plain tokens by this.
            messages: messages to keep.

        Raises:
            InvalidArgumentError: out of range, or not exactly one of both.
        """
        if (to is None) == (messages is None):
            raise InvalidArgumentError("rewind takes either a number of tokens or messages=, exactly one")
        with self._exclusive() as state:
            if to is not None:
                state.rewind(integer("to", to, 0, len(state.tokens)))
                self._messages = []
                return
            kept = self._messages[: integer("messages", messages, 0, len(self._messages))]
            state.restart(self._runtime.reader.render_begun(kept, **self._template) if kept else [])
            self._messages = kept

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens: `rewind` counted from the end."""
        length = len(self)
        self.rewind(length - integer("count", count, 0, length))

    def fork(self) -> Session:
        """Return a second session with the same past; memory is shared until they differ."""
        with self._exclusive() as state:
            other = Session(self._runtime, **self._template)
            other._state = state.fork()
            other._messages = list(self._messages)
            return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its state to a file that only you may read.

        An older file is replaced in one step: whenever this is interrupted, the old one or the new one is
        there, whole.

        Raises:
            InvalidArgumentError: it can't be written there, or messages hold what JSON has no form for.
            LilyError: an answer is being generated.
        """
        target = checked_path("path", path)
        with self._exclusive() as state:
            conversation = Conversation(list(self._messages), self._template)
            save_session(target, self._runtime.identity, state, conversation)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take up the conversation that `save` wrote, in place of the present one; it goes on bit for bit.

        Raises:
            SavedStateError: the file is damaged, or belongs to another model or setting; names both. The
                session is then as it was.
            InvalidArgumentError: there is no such file.
            ContextLengthError, MemoryBudgetError: it doesn't fit.
        """
        source = checked_path("path", path)
        with self._exclusive() as state:
            try:
                saved = SavedSession(source, self._runtime.identity)
            except FileNotFoundError:
                raise InvalidArgumentError(f"{source}: no such file; session.save(path) writes one") from None
            self._check_room(len(saved.tokens))
            reserved = self._runtime.budget.admit(len(saved.tokens))
            try:
                saved.restore(self._runtime.model, state)
            finally:
                self._runtime.budget.release(reserved)
            self._messages = saved.conversation.messages
            self._template = saved.conversation.template
            state.snapshot()

    def close(self) -> None:
        """End what is running and let the memory go; may be called again."""
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            stream.close()
        self._state = None
        self._runtime.holders.discard(self)

    def blocks(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the native memory held; none while an answer has it reserved."""
        with self._guard:
            return [] if self._state is None or self._busy else self._state.blocks()

    def _prompt(self, prompt: PromptLike | None, keywords: Mapping[str, Any]) -> tuple[list[Message], Prompt]:
        """Return (the messages then, the whole conversation's prompt)."""
        state = self._open_state()
        template = {
            **self._template,
            **{k: keywords[k] for k in self._template if keywords.get(k) is not None},
        }
        messages = (
            None if prompt is None else self._as_messages(prompt, text_is_message=not keywords.get("raw"))
        )
        if messages is not None or (prompt is None and self._messages):
            conversation = [*self._messages, *(messages or ())]
            return conversation, self._runtime.reader.render(conversation, **template)
        given = {name: keywords[name] for name in PROMPT_NAMES if keywords.get(name) is not None}
        if prompt is None:
            if not state.tokens:
                raise InvalidArgumentError(
                    "the session has no tokens yet; give a prompt or append some first"
                )
            return [], Prompt(list(state.tokens))
        added = self._runtime.reader.read(prompt, **{**given, "raw": isinstance(prompt, str)})
        return [], Prompt([*state.tokens, *added.tokens])

    def _as_messages(self, content: Any, *, text_is_message: bool = False) -> Sequence[Message] | None:
        """Return the messages that content means here, or None if it is text or tokens to add as they are."""
        state = self._open_state()
        plain = bool(state.tokens) and not self._messages
        if isinstance(content, str):
            has_template = self._runtime.reader.template is not None
            if text_is_message and has_template and not plain:
                return [{"role": "user", "content": content}]
        elif isinstance(content, Sequence) and len(content) > 0 and isinstance(content[0], Mapping):
            if plain:
                raise InvalidArgumentError(
                    "this session holds plain tokens, which messages can't be added to: use a new session, "
                    "or rewind(messages=...) instead of rewind(to=...)"
                )
            return copy.deepcopy(content)
        if self._messages:
            raise InvalidArgumentError(
                "this session holds messages, which plain text or tokens can't be added to: give messages, "
                "or a text to generate()"
            )
        return None

    def _check_room(self, tokens: int) -> None:
        if tokens > self._runtime.context:
            raise ContextLengthError(
                f"the session would hold {tokens} tokens, the context is {self._runtime.context}: rewind, "
                "drop earlier turns, or load the engine with a larger max_context"
            )

    def _open_state(self) -> State:
        self._runtime.check()
        if self._state is None:
            raise LilyError("the session is closed; make a new one with engine.new_session()")
        return self._state

    def _begin(self) -> None:
        self._open_state()
        if not self._lock.acquire(blocking=False):
            raise LilyError(
                "the session is in use: an answer is being generated; finish or close its stream first"
            )
        with self._guard:
            self._busy = True

    def _end(self) -> None:
        with self._guard:
            self._busy = False
        self._lock.release()

    @contextmanager
    def _exclusive(self) -> Iterator[State]:
        self._begin()
        try:
            yield self._open_state()
        finally:
            self._end()
