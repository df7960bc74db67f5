"""What an engine and its sessions share: the model, its text side, stored states and memory budget."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lily_py import _core
from lily_py.checkpoint import Checkpoint
from lily_py.errors import BackendError, ContextLengthError, EngineClosedError, InvalidArgumentError
from lily_py.generation import Generation
from lily_py.identity import state_identity
from lily_py.living import Living
from lily_py.memory import MemoryBudget
from lily_py.prefix_store import PrefixStore
from lily_py.progress import PrefillBar, prefill_progress
from lily_py.prompts import Prompt, PromptLike, PromptReader
from lily_py.sampling import (
    OPTION_NAMES,
    SamplingOptions,
    checkpoint_defaults,
    new_seed,
    read_options,
    refuse_unknown,
)
from lily_py.speculation import DEFAULT_DRAFT_TOKENS, SPECULATIONS
from lily_py.state import Progress, State
from lily_py.stream import Stream
from lily_py.text import ChatTemplate, Tokenizer
from lily_py.workers import Workers

DEFAULT_MAX_TOKENS = 4096
"""Longest answer when `max_tokens` isn't given, if the context and the memory limit leave room for it."""

PROMPT_NAMES = ("raw", "tools", "thinking", "template_variables")
REQUEST_NAMES = (*OPTION_NAMES, *PROMPT_NAMES, "progress")


@dataclass(frozen=True)
class Request:
    """A checked call: what to answer and how.

    Attributes:
        prompt: the tokens to continue.
        options: `max_tokens` settled.
        progress: of the prompt's computation.
    """

    prompt: Prompt
    options: SamplingOptions
    progress: Progress | None


class Runtime:
    """A loaded checkpoint, ready to advance states. Any thread may call.

    Args:
        checkpoint: its description.
        model: the native model.
        context: most tokens that a conversation may have.
        cache_bytes: budget of the prefix store.
        snapshot_interval: a snapshot every so many tokens.
        memory_limit: bytes for everything; None for no limit.
        kv_dtype: of keys and values.
        ablate: optimisations switched off.
        speculation: a name of `SPECULATIONS`, or None.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: _core.Model,
        *,
        context: int,
        cache_bytes: int,
        snapshot_interval: int,
        memory_limit: int | None,
        kv_dtype: str,
        ablate: Sequence[str],
        speculation: str | None,
    ) -> None:
        self.checkpoint = checkpoint
        self._kv_dtype = kv_dtype
        self._ablate = tuple(ablate)
        self.context = context
        self.speculate = None if speculation is None else SPECULATIONS[speculation]
        """Makes an answer's speculation."""
        self.snapshot_interval = snapshot_interval
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        template = None if checkpoint.chat_template is None else ChatTemplate.from_checkpoint(checkpoint)
        self.reader = PromptReader(self.tokenizer, template, checkpoint.config.vocab_size)
        self.vocabulary = min(self.tokenizer.vocab_size, checkpoint.config.vocab_size)
        self.defaults = checkpoint_defaults(checkpoint.generation_config)
        self.store = PrefixStore(cache_bytes)
        self.streams: Living[Stream] = Living()
        self.holders: Living[Any] = Living()
        """Sessions: whatever has `blocks()` and `close()`."""
        self.workers = Workers()
        gpu = model.memory
        limit = gpu.get("limit", memory_limit)
        self.budget = MemoryBudget(
            limit,
            name="memory_limit" if limit == memory_limit else "the GPU's memory",
            fixed=sum(gpu[part] for part in gpu if part != "limit") if gpu else checkpoint.nbytes,
            token_bytes=model.kv_bytes_per_token,
            state_bytes=model.recurrent_bytes,
            held=self._held,
            store=self.store,
        )
        self._model: _core.Model | None = model
        self._process = os.getpid()

    @property
    def model(self) -> _core.Model:
        """The native model.

        Raises:
            EngineClosedError: after `close`.
            BackendError: in a process forked after the load.
        """
        self.check()
        assert self._model is not None
        return self._model

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What saved states must agree in with this engine; see `lily_py.identity`."""
        return state_identity(self.checkpoint, self.model, self._kv_dtype, self._ablate)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._model is None

    def check(self) -> None:
        """Raise unless the engine can be used here; errors as in `model`."""
        if self._model is None:
            raise EngineClosedError("the engine is closed; load it again to go on")
        if os.getpid() != self._process:
            raise BackendError(
                f"the engine was loaded in process {self._process} and can't be used in its fork "
                f"{os.getpid()}: its threads don't exist here; load it after the fork, or use 'spawn'"
            )

    def close(self) -> None:
        """End streams and sessions and let the memory go; may be called again."""
        if self._model is None:
            return
        if os.getpid() == self._process:
            for stream in self.streams:
                stream.close()
            for holder in self.holders:
                holder.close()
            self.store.close()
            self.workers.close()
        self._model = None

    def new_state(self) -> State:
        """Return an empty state."""
        return State(self.model, self.store, self.snapshot_interval)

    def read_request(self, prompt: PromptLike, keywords: Mapping[str, Any]) -> Request:
        """Check a call's prompt and keywords.

        Args:
            prompt: text, messages or tokens.
            keywords: as the caller gave them.

        Raises:
            UnknownKeywordError, InvalidArgumentError, TemplateError, ContextLengthError.
        """
        options, progress = self.read_keywords(keywords)
        read = self.read_prompt(prompt, keywords)
        return Request(read, self.settle_length(options, len(read.tokens)), progress)

    def read_prompt(self, prompt: PromptLike, keywords: Mapping[str, Any]) -> Prompt:
        """Read a call's prompt with those of its keywords that concern it; errors as in `read_request`."""
        given = {
            name: value for name, value in keywords.items() if name in PROMPT_NAMES and value is not None
        }
        return self.reader.read(prompt, **given)

    def read_keywords(self, keywords: Mapping[str, Any]) -> tuple[SamplingOptions, Progress | None]:
        """Check a call's keywords; errors as in `read_request`."""
        self.check()
        refuse_unknown(keywords, REQUEST_NAMES)
        progress = self.read_progress(keywords.get("progress"))
        given = {name: value for name, value in keywords.items() if name in OPTION_NAMES}
        options = read_options(self.defaults, given, self.checkpoint.config.vocab_size)
        if options.draft_tokens and self.speculate is None:
            raise InvalidArgumentError(
                f"draft_tokens={options.draft_tokens} needs an engine that speculates: "
                "Engine.load(..., speculation='prompt_lookup')"
            )
        return options, prefill_progress(progress)

    def read_progress(self, progress: Any) -> bool | Progress | None:
        """Return what a `progress` argument is, checked."""
        self.check()
        if progress is None or isinstance(progress, bool) or callable(progress):
            return cast("bool | Progress | None", progress)
        raise InvalidArgumentError(
            f"progress must be True, False or a function of (done, total), got {progress!r}"
        )

    def settle_length(self, options: SamplingOptions, prompt: int) -> SamplingOptions:
        """Return options whose `max_tokens` is a number that the context has room for.

        Raises:
            ContextLengthError: says how many tokens there are and how many fit.
        """
        room = self.context - prompt
        remedy = f"load the engine with a larger max_context (the checkpoint's limit is {self._positions})"
        if self.context >= self._positions:
            remedy = "drop earlier turns"
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the context {self.context}, which leaves no room for an "
                f"answer: shorten it by {1 - room} tokens or more, or {remedy}"
            )
        if options.max_tokens is None:
            fitting = self.budget.fitting()
            most = min(DEFAULT_MAX_TOKENS, room, room if fitting is None else max(1, fitting - prompt))
            return replace(options, max_tokens=max(most, options.min_tokens))
        if options.max_tokens > room:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and max_tokens is {options.max_tokens}, "
                f"together {prompt + options.max_tokens}, but the context is {self.context}: lower "
                f"max_tokens to {room}, shorten the prompt, or {remedy}"
            )
        return options

    def open_stream(
        self,
        state: State,
        request: Request,
        *,
        cached: int,
        started: float,
        on_end: Callable[[Generation], None],
    ) -> Stream:
        """Return a stream that continues a state; the memory for it is reserved until its end.

        Args:
            state: holds the prompt's tokens, and nothing after them.
            request: what to do.
            cached: tokens that the state covers.
            started: `time.perf_counter()` of the call.
            on_end: called once at the end.

        Raises:
            MemoryBudgetError: it won't fit.
        """
        options = request.options
        assert options.max_tokens is not None
        drafts = DEFAULT_DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
        reserved = self.budget.admit(len(state.tokens) + options.max_tokens)
        try:
            generation = Generation(
                state,
                request.prompt,
                options,
                seed=new_seed() if options.seed is None else options.seed,
                tokenizer=self.tokenizer,
                vocabulary=self.vocabulary,
                cached=cached,
                progress=request.progress,
                started=started,
                speculation=self.speculate(drafts) if self.speculate is not None and drafts else None,
            )
        except BaseException:
            self.budget.release(reserved)
            raise

        def end() -> None:
            try:
                if isinstance(request.progress, PrefillBar):
                    request.progress.close()
                on_end(generation)
            finally:
                self.budget.release(reserved)

        stream = Stream(generation, self.check, end)
        self.streams.add(stream)
        return stream

    @property
    def _positions(self) -> int:
        return self.checkpoint.config.max_position_embeddings

    def _held(self) -> list[tuple[int, int]]:
        return [block for holder in self.holders for block in holder.blocks()]
