"""One answer in the making: token by token, with what each of them shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy

from lily_py import _core
from lily_py.errors import InvalidArgumentError
from lily_py.grammar import Matcher
from lily_py.memory import peak_memory
from lily_py.prompts import Prompt
from lily_py.results import Chunk, FinishReason, Result, Timings, TokenLogprob, Usage
from lily_py.sampling import SamplingOptions
from lily_py.speculation import Speculation
from lily_py.state import Logits, Progress, State
from lily_py.text import (
    AnswerParser,
    Detokenizer,
    Event,
    ReasoningDelta,
    StopStrings,
    TextDelta,
    Tokenizer,
    ToolCall,
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
LINE_BREAK = "\u010a\u010a"
"""The empty line that templates write after a thought, in the letters of byte-level vocabularies."""


class Generation:
    """Advances a state by one answer. Not for several threads at once; only `cancel` may come from another.

    Args:
        state: holds the prompt's tokens already; on the way, and at the end, it holds the prompt and the
            tokens generated so far.
        prompt: what is answered.
        options: with `max_tokens` settled.
        seed: of the random numbers.
        tokenizer: of the checkpoint.
        vocabulary: ids from here on are never drawn.
        cached: prompt tokens that needn't be computed.
        progress: of the prompt's computation.
        started: `time.perf_counter()` of the call.
        speculation: of this answer, or None.
    """

    def __init__(
        self,
        state: State,
        prompt: Prompt,
        options: SamplingOptions,
        *,
        seed: int,
        tokenizer: Tokenizer,
        vocabulary: int,
        cached: int,
        progress: Progress | None,
        started: float,
        speculation: Speculation | None = None,
    ) -> None:
        self.cancel = _core.CancelToken()
        self.finish_reason: FinishReason | None = None
        self._state = state
        self._prompt = prompt
        self._options = options
        self._seed = seed
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._progress = progress
        self._started = started
        self._speculation = speculation
        self._sampler = options.make_sampler(seed, vocabulary)
        self._sampler.observe(numpy.array(state.tokens, numpy.int32))
        self._end_tokens = frozenset(tokenizer.eos_token_ids)
        self._max_tokens = options.max_tokens or 0
        self._detokenizer = Detokenizer(tokenizer)
        self._parser = AnswerParser(thinking=prompt.thinking, tools=prompt.tools) if prompt.chat else None
        self._stops = StopStrings(options.stop) if options.stop else None
        self._think_close = tokenizer.token_id(THINK_CLOSE)
        self._think_open = tokenizer.token_id(THINK_OPEN)
        self._in_thought = prompt.thinking
        self._prompt_length = len(state.tokens)
        self._cached = cached
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprob] = []
        self._reasoning_tokens = 0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._ttft = 0.0
        self._matcher: Matcher | None = None
        if options.constraint is not None:
            if prompt.tools is not None:
                raise InvalidArgumentError(
                    f"{options.constraint.name} can't be combined with tools: calls don't follow it"
                )
            self._matcher = Matcher(options.constraint, tokenizer)
        self._line_break = tokenizer.token_id(LINE_BREAK)
        self._thought_closed = False
        self._restricted = False
        self._restrict()

    @staticmethod
    def draw_each(generations: Sequence[Generation]) -> list[int | None]:
        """Draw the next token of several in one pass, for `advance` of each.

        None stands for one that has to be advanced alone: at its beginning, with logits processors, or
        cancelled.
        """
        together = [each for each in generations if each._can_join()]
        if not together:
            return [None] * len(generations)
        begun = time.perf_counter()
        drawn = State.step_each([each._state for each in together], [each._sampler for each in together])
        seconds = time.perf_counter() - begun
        for each in together:
            each._decode_seconds += seconds
        tokens = iter(drawn)
        return [next(tokens) if each in together else None for each in generations]

    def advance(self, drawn: int | None = None) -> Chunk | None:
        """Generate one more token; return what it brought, or None after the end.

        The last chunk has a `finish_reason`; if the generation was cancelled it has no token.

        Args:
            drawn: the token, if `draw_each` has drawn it.
        """
        if self.finish_reason is not None:
            return None
        if drawn is not None:
            return self._accept(drawn)
        if self.cancel.cancelled:
            return self._finish("cancelled", (), ())
        begun = time.perf_counter()
        if self._tokens:
            token = self._draw_next()
            self._decode_seconds += time.perf_counter() - begun
        else:
            self._state.join()
            logits = self._state.advance(self.cancel, self._progress, self._marks())
            if logits is None:
                self._prefill_seconds = time.perf_counter() - begun
                return self._finish("cancelled", (), ())
            token = self._draw_from(logits)
            now = time.perf_counter()
            self._prefill_seconds, self._ttft = now - begun, now - self._started
        return self._accept(token)

    def stop(self) -> None:
        """End as cancelled, if it hasn't ended; text held back is settled."""
        if self.finish_reason is None:
            self._finish("cancelled", (), ())

    def result(self) -> Result:
        """Return the answer; only after the end."""
        assert self.finish_reason is not None
        computed = self._state_prefilled()
        decoded = len(self._tokens) - 1
        thought = self._parser is not None and self._parser.had_thought
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            finish_reason=self.finish_reason,
            reasoning="".join(self._reasoning) if thought else None,
            tool_calls=tuple(self._calls),
            usage=Usage(
                prompt_tokens=self._prompt_length,
                completion_tokens=len(self._tokens),
                cached_tokens=self._cached,
                reasoning_tokens=self._reasoning_tokens,
                drafted_tokens=0 if self._speculation is None else self._speculation.drafted,
                accepted_tokens=0 if self._speculation is None else self._speculation.accepted,
            ),
            timings=Timings(
                ttft=self._ttft,
                prefill_seconds=self._prefill_seconds,
                decode_seconds=self._decode_seconds,
                prefill_tokens_per_second=_rate(computed, self._prefill_seconds),
                decode_tokens_per_second=_rate(decoded, self._decode_seconds),
                peak_memory_bytes=peak_memory(),
            ),
            seed=self._seed,
            logprobs=tuple(self._logprobs) if self._options.logprobs else None,
            stop=self._stops.matched if self._stops is not None else None,
        )

    def _state_prefilled(self) -> int:
        """Return how many prompt tokens were computed."""
        return max(0, min(self._state.covered, self._prompt_length) - self._cached)

    def _marks(self) -> tuple[int, ...]:
        # The one before the end lets an exact repeat, or another answer to the same prompt, cost one step.
        return (*self._prompt.marks, self._prompt_length - 1)

    def _can_join(self) -> bool:
        native = not self._options.logits_processors
        return native and self.finish_reason is None and bool(self._tokens) and not self.cancel.cancelled

    def _draw_next(self) -> int:
        drafts = self._drafts()
        if not self._options.logits_processors:
            return self._state.step(self._sampler, drafts)
        return self._draw_from(self._state.step_logits(drafts))

    def _drafts(self) -> list[int]:
        """Return what to compute with the last token."""
        if self._speculation is None:
            return []
        # Others are better served by passes that are over sooner.
        useful = self._max_tokens - len(self._tokens) - 1 if self._state.alone else 0
        return self._speculation.drafts(self._state.tokens, useful)

    def _draw_from(self, logits: Logits) -> int:
        if not self._options.logits_processors:
            return self._sampler.draw(logits)
        changed = logits.copy()
        for processor in self._options.logits_processors:
            returned = processor(list(self._state.tokens), changed)
            try:
                changed = numpy.asarray(returned, numpy.float32)
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(
                    f"logits_processors: one returned {type(returned).__name__}, expected numbers"
                ) from error
            if changed.shape != logits.shape:
                raise InvalidArgumentError(
                    f"logits_processors: one returned shape {changed.shape}, expected {logits.shape}"
                )
        return self._sampler.draw(numpy.ascontiguousarray(changed), logits)

    def _restrict(self) -> None:
        """Set which tokens the next draw may bring."""
        may_end = len(self._tokens) >= self._options.min_tokens
        if self._matcher is not None and not self._in_thought:
            words = self._matcher.allowed(may_end=may_end)
            if self._thought_closed and self._line_break is not None:
                words[self._line_break // 32] |= numpy.uint32(1 << self._line_break % 32)
        elif self._matcher is not None or not may_end:
            # An answer that must follow something can't end in its thought.
            words = numpy.full((self._vocabulary + 31) // 32, 0xFFFFFFFF, numpy.uint32)
            for token in self._end_tokens:
                if token < self._vocabulary:
                    words[token // 32] &= ~numpy.uint32(1 << token % 32)
        elif self._restricted:
            words = numpy.zeros(0, numpy.uint32)
        else:
            return
        self._sampler.allow_bits(words)
        self._restricted = len(words) > 0

    def _follow(self, token: int) -> None:
        """Take a token of the answer into account for the next draw."""
        if self._matcher is not None and not self._in_thought and token not in self._end_tokens:
            # A line break right after the thought belongs to neither.
            if not (self._thought_closed and token == self._line_break):
                self._matcher.accept(token)
            self._thought_closed = False

    def _accept(self, token: int) -> Chunk:
        self._state.tokens.append(token)
        self._tokens.append(token)
        if self._speculation is not None:
            self._speculation.drawn(token)
        count = len(self._tokens)
        logprobs = self._keep_logprobs(token) if self._options.logprobs else ()
        if self._in_thought:
            self._reasoning_tokens += 1
            self._in_thought = token != self._think_close
            self._thought_closed = not self._in_thought
        elif token == self._think_open and count == 1 and self._parser is not None:
            self._in_thought = True
            self._reasoning_tokens = 1
        else:
            self._follow(token)
        if token in self._end_tokens:
            return self._finish("stop", (token,), logprobs)
        self._restrict()
        text = self._detokenizer.add(token)
        if self._parser is None:
            reasoning: str = ""
            calls: tuple[ToolCall, ...] = ()
        else:
            text, reasoning, calls = self._split(self._parser.feed(text)) if text else ("", "", ())
        if self._stops is not None and text:
            text = self._stops.feed(text)
            if self._stops.matched is not None:
                return self._finish("stop", (token,), logprobs, text, reasoning, calls)
        if count >= self._max_tokens:
            return self._finish("length", (token,), logprobs, text, reasoning, calls)
        if text:
            self._text.append(text)
        if reasoning:
            self._reasoning.append(reasoning)
        return Chunk(text, reasoning, calls, (token,), logprobs)

    def _finish(
        self,
        reason: FinishReason,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        text: str = "",
        reasoning: str = "",
        calls: tuple[ToolCall, ...] = (),
    ) -> Chunk:
        """Settle what was held back, and end; return the last chunk."""
        self._state.leave()
        rest = self._detokenizer.finish()
        if self._parser is not None:
            events = self._parser.feed(rest) if rest else []
            rest, more_reasoning, more_calls = self._split([*events, *self._parser.finish()])
            reasoning += more_reasoning
            calls += more_calls
        if self._stops is not None:
            met = self._stops.matched is not None
            text += self._stops.feed(rest)
            if self._stops.matched is None:
                text += self._stops.finish()
            elif not met and reason == "length":
                reason = "stop"
        else:
            text += rest
        self._text.append(text)
        self._reasoning.append(reasoning)
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        self.finish_reason = reason
        return Chunk(text, reasoning, calls, tokens, logprobs, reason)

    def _split(self, events: list[Event]) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Return (text, reasoning, calls) of events; calls are noted."""
        text = reasoning = ""
        calls: tuple[ToolCall, ...] = ()
        for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            elif self._stops is None or self._stops.matched is None:
                calls += (event,)
                self._calls.append(event)
        return text, reasoning, calls

    def _keep_logprobs(self, token: int) -> tuple[TokenLogprob, ...]:
        top = self._sampler.best(self._options.top_logprobs) if self._options.top_logprobs else []
        kept = TokenLogprob(
            token,
            self._text_of(token),
            self._sampler.log_probability(token),
            tuple(TokenLogprob(other, self._text_of(other), value) for other, value in top),
        )
        self._logprobs.append(kept)
        return (kept,)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)


def with_others(results: list[Result]) -> Result:
    """Return the first of several answers, holding the others."""
    return replace(results[0], others=tuple(results[1:]))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
