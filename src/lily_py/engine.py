"""The engine: a checkpoint loaded, and everything a caller does with it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from lily_py import _core
from lily_py.answers import Answers
from lily_py.checkpoint import open_checkpoint
from lily_py.disk_store import DiskStore, disk_budget
from lily_py.errors import BackendError, ContextLengthError, InvalidArgumentError
from lily_py.generation import Generation, with_others
from lily_py.info import EngineInfo
from lily_py.loader import load_model
from lily_py.memory import parse_size, physical_memory
from lily_py.prefix_store import PrefixStore
from lily_py.progress import shown
from lily_py.prompts import PromptLike
from lily_py.results import Result
from lily_py.runtime import PROMPT_NAMES, Runtime
from lily_py.sampling import boolean, integer, new_seed, refuse_unknown
from lily_py.session import Session
from lily_py.speculation import SPECULATIONS
from lily_py.state import Logits, Progress, State
from lily_py.state_file import checked_path
from lily_py.stream import AsyncStream, Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lily_py.sampling import Keywords

logger = logging.getLogger("lily")

Message = Mapping[str, Any]

BACKENDS = ("auto", "cpu", "metal")
KV_DTYPES = ("bfloat16", "float32", "int8")
DEFAULT_SNAPSHOT_INTERVAL = 4096
"""Tokens between snapshots: for the 35B model, one costs as much memory as 3,100 tokens do."""
_CACHE_SHARE = 8
"""The store of states may take one part in so many of the machine's memory."""


class Engine:
    """A loaded model. Any thread may call any method; what is asked for at once is computed together.

    Use `Engine.load`. A context manager: leaving the block closes it.

    States of earlier calls are kept and found again by themselves: a prompt that begins like an earlier one
    costs only what is new (`Result.usage.cached_tokens`), with exactly the result of a computation from
    scratch.
    """

    def __init__(self, name: str, runtime: Runtime) -> None:
        self._name = name
        self._runtime = runtime
        self._default = _DefaultState(runtime)
        self._warned_greedy = False

    @classmethod
    def load(
        cls,
        path_or_repo: str | os.PathLike[str],
        *,
        backend: str = "auto",
        mtp: str | os.PathLike[str] | None = None,
        max_context: int | None = None,
        memory_limit: int | float | str | None = None,
        threads: int | None = None,
        revision: str | None = None,
        progress: bool | None = None,
        kv_dtype: str = "bfloat16",
        ablate: Sequence[str] = (),
        cache_bytes: int | float | str | None = None,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_bytes: int | float | str | None = None,
        speculation: str | None = None,
    ) -> Engine:
        """Load a checkpoint; its weights are mapped, so this takes seconds at most.

        Args:
            path_or_repo: ``"demo"``, a folder, or a Hugging Face repository.
            backend: ``"cpu"``, ``"metal"``, or ``"auto"`` for the best that works here.
            mtp: file, folder or repository with a multi-token prediction head for the checkpoint.
            max_context: most tokens of a conversation; None for the checkpoint's own limit. On a GPU one that
                is given must fit into its memory.
            memory_limit: for weights, conversations and stored states together, in bytes or as ``"24GB"``. On
                a GPU also for its buffers, and at most what its system recommends.
            threads: None for one per core.
            revision: branch, tag or commit of a repository.
            progress: show download bars; None shows them where a person watches.
            kv_dtype: of stored keys and values: ``"bfloat16"``, ``"float32"``, or ``"int8"`` for half the
                memory at a small loss of accuracy (CPU backend only; docs/numerics.md).
            ablate: names of optimisations to switch off, for measurements.
            cache_bytes: budget of stored states; None for an eighth of the machine's memory, 0 for none.
            snapshot_interval: tokens between snapshots on long ways; 0 for those at turns only.
            cache_dir: a folder that keeps stored states beyond the process; None for none. Several engines
                and models may share it.
            cache_dir_bytes: budget of that folder; None for 16 GiB, or half of what is free there.
            speculation: ``"prompt_lookup"`` drafts what followed the last tokens where they stood before, and
                verifies several in one pass: the same text, sooner where it repeats itself or its prompt
                (CPU backend only; docs/speculation.md).

        Raises:
            CheckpointError: and its kinds, for files that are missing, damaged or of an unknown architecture.
            BackendError: the backend doesn't exist here.
            MemoryBudgetError: the weights alone exceed the limit, or `max_context` a GPU's memory.
            InvalidArgumentError: an impossible value.
        """
        if backend not in BACKENDS:
            raise InvalidArgumentError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if kv_dtype not in KV_DTYPES:
            raise InvalidArgumentError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
        if speculation is not None and speculation not in SPECULATIONS:
            raise InvalidArgumentError(
                f"speculation must be None or one of {', '.join(SPECULATIONS)}, got {speculation!r}"
            )
        workers = 0 if threads is None else integer("threads", threads, 1, 1024)
        limit = None if memory_limit is None else parse_size("memory_limit", memory_limit)
        if cache_bytes is None:
            budget = min(physical_memory(), limit or physical_memory()) // _CACHE_SHARE
        else:
            budget = parse_size("cache_bytes", cache_bytes)
        interval = integer("snapshot_interval", snapshot_interval, 0, 1 << 30)
        if cache_dir is None and cache_dir_bytes is not None:
            raise InvalidArgumentError("cache_dir_bytes needs cache_dir, the folder that it is the budget of")
        if cache_dir is not None and not budget:
            raise InvalidArgumentError(
                "cache_dir needs cache_bytes above 0: what it keeps passes through there"
            )
        if cache_dir is not None:
            folder = checked_path("cache_dir", cache_dir)
            disk = disk_budget(folder, cache_dir_bytes)
        started = time.perf_counter()
        checkpoint = open_checkpoint(path_or_repo, revision=revision, mtp=mtp, progress=progress)
        positions = checkpoint.config.max_position_embeddings
        context = positions if max_context is None else integer("max_context", max_context, 1, positions)
        name = _resolve_backend(backend)
        model = load_model(
            checkpoint,
            backend=name,
            threads=workers,
            kv_dtype=kv_dtype,
            ablate=ablate,
            max_context=context,
            memory_limit=limit,
            whole_context=max_context is not None,
        )
        if speculation is not None and not model.can_verify:
            raise BackendError(
                f"speculation={speculation!r} works on the CPU backend only, not on {name!r}: load with "
                "backend='cpu', or without speculation"
            )
        runtime = Runtime(
            checkpoint,
            model,
            context=context,
            cache_bytes=budget,
            snapshot_interval=interval,
            memory_limit=limit,
            kv_dtype=kv_dtype,
            ablate=ablate,
            speculation=speculation,
        )
        if cache_dir is not None:
            runtime.store.keep_on(DiskStore(folder, disk, model, runtime.identity))
        engine = cls(os.fspath(path_or_repo), runtime)
        logger.info("loaded %r in %.2f s", engine, time.perf_counter() - started)
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        runtime = self._runtime
        if runtime.closed:
            return f"Engine({self._name!r}, closed)"
        config = runtime.checkpoint.config
        return (
            f"Engine({self._name!r}, {config.model_type}, {config.num_hidden_layers} layers, "
            f"{runtime.model.backend}, context {runtime.context}, {runtime.defaults.differences()})"
        )

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "an Engine can't be pickled or copied: it holds mapped files and threads; load it in each process"
        )

    def close(self) -> None:
        """End streams and sessions and let the memory go; may be called again. Later calls raise."""
        self._runtime.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._runtime.closed

    # ---- generation

    @overload
    def generate(
        self, prompt: PromptLike, *, stream: Literal[False] = False, **keywords: Unpack[Keywords]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: PromptLike, *, stream: Literal[True], **keywords: Unpack[Keywords]
    ) -> Stream: ...
    def generate(
        self, prompt: PromptLike, *, stream: bool = False, **keywords: Unpack[Keywords]
    ) -> Result | Stream:
        """Answer a prompt.

        Args:
            prompt: a text, which is one user message if the checkpoint has a chat template (``raw=True``
                continues it as it is); a list of messages; or token ids.
            stream: return a `Stream` instead of the finished result.
            **keywords: see `lily_py.sampling.Keywords`; None is the default.

        Raises:
            UnknownKeywordError: suggests the nearest keyword.
            InvalidArgumentError: names the argument, its value and what is allowed.
            ContextLengthError: prompt, or prompt and `max_tokens`, exceed the context; nothing was computed.
            TemplateError: the messages can't be rendered.
            MemoryBudgetError: it won't fit into `memory_limit`; says what would.
            EngineClosedError: after `close`.
        """
        if boolean("stream", stream):
            return self.stream(prompt, **keywords)
        return with_others(self._answers(prompt, keywords).run())

    def stream(self, prompt: PromptLike, **keywords: Unpack[Keywords]) -> Stream:
        """Answer a prompt chunk by chunk, one for each token; arguments and errors as for `generate`."""
        started = time.perf_counter()
        request = self._runtime.read_request(prompt, keywords)
        if request.options.n != 1:
            raise InvalidArgumentError(
                f"n must be 1 for a stream, got {request.options.n}; open several with different seeds"
            )
        if request.prompt.thinking and request.options.temperature == 0 and not self._warned_greedy:
            self._warned_greedy = True
            logger.warning("greedy decoding of thoughts tends to loop; a temperature of 0.6 to 1 is advised")
        state = self._runtime.new_state()
        cached = state.restart(request.prompt.tokens)

        def keep(generation: Generation) -> None:
            if not self._runtime.closed:
                state.snapshot()

        return self._runtime.open_stream(state, request, cached=cached, started=started, on_end=keep)

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[False] = False, **keywords: Unpack[Keywords]
    ) -> Result: ...
    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[True], **keywords: Unpack[Keywords]
    ) -> Stream: ...
    def chat(
        self, messages: Sequence[Message], *, stream: bool = False, **keywords: Unpack[Keywords]
    ) -> Result | Stream:
        """Answer a conversation, given in full each time; keywords and errors as for `generate`.

        ``result.message`` is the answer in the form to append.
        """
        if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], Mapping):
            raise InvalidArgumentError(
                f"messages must be a list of messages, not empty, got {type(messages).__name__}"
            )
        if boolean("stream", stream):
            return self.stream(messages, **keywords)
        return self.generate(messages, **keywords)

    async def agenerate(self, prompt: PromptLike, **keywords: Unpack[Keywords]) -> Result:
        """Answer as `generate` does, in a worker thread; cancelling the task ends the generation."""
        answers = self._answers(prompt, keywords)
        try:
            return with_others(await self._runtime.workers.run(answers.run))
        except asyncio.CancelledError:
            answers.cancel()
            raise

    def astream(self, prompt: PromptLike, **keywords: Unpack[Keywords]) -> AsyncStream:
        """Answer as `stream` does, for ``async for``."""
        return AsyncStream(lambda: self.stream(prompt, **keywords), self._runtime.workers)

    def new_session(
        self,
        *,
        tools: Sequence[Message] | None = None,
        thinking: bool | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Session:
        """Return an empty conversation that keeps its state; arguments are for its template."""
        return Session(self._runtime, tools=tools, thinking=thinking, template_variables=template_variables)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Return the conversation that `Session.save` wrote; errors as for `Session.load`."""
        session = self.new_session()
        try:
            session.load(path)
        except BaseException:
            session.close()
            raise
        return session

    # ---- logits

    def prefill(self, ids: Sequence[int], progress: bool | Progress | None = None) -> Logits:
        """Start the default conversation anew with these tokens; return the logits [vocab] after the last.

        Nothing is taken from stored states, so that this measures what it says.

        Args:
            ids: at least one token.
            progress: called with (done, total) after each chunk; a bar for True, and for None where a person
                watches and it takes long.
        """
        tokens = self._runtime.reader.tokens(ids)
        with shown(self._runtime.read_progress(progress)) as callback:
            return self._default.prefill(tokens, callback)

    def decode_step(self, token: int) -> Logits:
        """Add one token to the default conversation; return the logits [vocab] after it."""
        return self._default.decode_step(integer("token", token, 0, self._runtime.reader.vocabulary - 1))

    # ---- text

    def tokenize(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: any text.
            special_tokens: recognise control tokens written in it, such as ``<|im_end|>``.
        """
        self._runtime.check()
        return self._runtime.tokenizer.encode(text, special_tokens=special_tokens)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; control tokens are left out unless `skip_special` is False."""
        self._runtime.check()
        if not isinstance(tokens, Iterable):
            raise InvalidArgumentError(f"tokens must be a list of token ids, got {tokens!r}")
        return self._runtime.tokenizer.decode(tokens, skip_special=skip_special)

    def count_tokens(self, prompt: PromptLike, **keywords: Any) -> int:
        """Return how many tokens a prompt has, as `generate` would read it.

        Args:
            prompt: as for `generate`.
            **keywords: `raw`, `tools`, `thinking`, `template_variables`.
        """
        self._runtime.check()
        refuse_unknown(keywords, PROMPT_NAMES)
        return len(self._runtime.read_prompt(prompt, keywords).tokens)

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> str:
        """Return a conversation as the model would see it; ``generate(text, raw=True)`` continues it.

        Args:
            messages: as for `chat`.
            tools: function descriptions.
            thinking: ask for a thought or for none; None leaves it to the template.
            add_generation_prompt: end with the opening of the answer's turn.
            **template_variables: anything else that the template knows.
        """
        self._runtime.check()
        return self._runtime.reader.render_text(
            messages,
            tools=tools,
            thinking=thinking,
            template_variables=template_variables,
            add_generation_prompt=add_generation_prompt,
        )

    def info(self) -> EngineInfo:
        """Return what is loaded and the memory it takes."""
        runtime = self._runtime
        model, config = runtime.model, runtime.checkpoint.config
        return EngineInfo(
            checkpoint=str(runtime.checkpoint.folder),
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            attention_layers=config.layer_types.count("full_attention"),
            experts=config.num_experts,
            experts_per_token=config.num_experts_per_tok,
            vocabulary=runtime.vocabulary,
            backend=model.backend,
            context=runtime.context,
            weights=runtime.checkpoint.nbytes,
            kv_per_token=model.kv_bytes_per_token,
            recurrent_state=model.recurrent_bytes,
            cache_budget=runtime.store.budget,
            cache_used=runtime.store.nbytes,
            in_use=runtime.budget.in_use,
            memory_limit=runtime.budget.limit,
            mtp=runtime.checkpoint.mtp_source,
            defaults=runtime.defaults.differences(),
            draws=model.draws,
            gpu_memory=model.memory,
        )

    def _answers(self, prompt: PromptLike, keywords: Mapping[str, Any]) -> Answers:
        """Return the `n` answers to be made: answer i is what the seed plus i gives alone."""
        options, _ = self._runtime.read_keywords(keywords)
        seed = new_seed() if options.seed is None else options.seed
        each = [{**keywords, "n": 1, "seed": (seed + i) % (1 << 64)} for i in range(options.n)]
        return Answers([partial(self.stream, prompt, **one) for one in each])


class _DefaultState:
    """The conversation that `prefill` and `decode_step` work on; calls take turns. It stores no snapshots."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._state: State | None = None
        runtime.holders.add(self)

    def prefill(self, tokens: list[int], progress: Progress | None) -> Logits:
        with self._lock:
            self._state = State(self._runtime.model, PrefixStore(0), 0)
            return self._extend(self._state, tokens, progress)

    def decode_step(self, token: int) -> Logits:
        with self._lock:
            if self._state is None:
                self._state = State(self._runtime.model, PrefixStore(0), 0)
            return self._extend(self._state, [token], None)

    def blocks(self) -> list[tuple[int, int]]:
        # In use, its memory is reserved, and its pages may be changing.
        if not self._lock.acquire(blocking=False):
            return []
        try:
            return [] if self._state is None else self._state.blocks()
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._state = None

    def _extend(self, state: State, tokens: list[int], progress: Progress | None) -> Logits:
        self._runtime.check()
        before = len(state.tokens)
        length = before + len(tokens)
        if length > self._runtime.context:
            raise ContextLengthError(
                f"the conversation would hold {length} tokens, the context is {self._runtime.context}"
            )
        reserved = self._runtime.budget.admit(length)
        try:
            state.extend(tokens)
            logits = state.advance(progress=progress)
        except BaseException:
            state.rewind(before)
            raise
        finally:
            self._runtime.budget.release(reserved)
        assert logits is not None
        return logits


def _resolve_backend(backend: str) -> str:
    """Return the backend that a name means here."""
    available = _core.backends()
    if backend != "auto":
        if backend not in available:
            raise BackendError(
                f"this build has no {backend.capitalize()} backend; use backend='cpu' or 'auto'"
            )
        return backend
    for name in available:
        problem = _core.backend_problem(name)
        if not problem:
            return name
        logger.warning("the %s backend can't be used here: %s", name, problem)
    raise BackendError("none of this build's backends can be used here")
