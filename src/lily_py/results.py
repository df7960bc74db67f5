"""What a generation gives back: chunks while it runs, one result at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lily_py.text import ToolCall

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability by the model's own distribution, before temperature, penalties and filters.

    Attributes:
        token_id: the token.
        text: what it decodes to alone.
        logprob: natural logarithm of its probability.
        top: the most probable tokens here, best first; empty unless asked for.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Counted tokens.

    Attributes:
        prompt_tokens: of the prompt, cached ones included.
        completion_tokens: generated, end token included.
        cached_tokens: of the prompt, not computed because a stored state covered them.
        reasoning_tokens: of the generated, those in the thought.
        drafted_tokens: proposed by speculation and computed in passes with others.
        accepted_tokens: of the drafted, those that the model drew itself.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """How long it took; time that a stream's reader took between chunks isn't counted.

    Attributes:
        ttft: seconds from the call to the first token; 0 if there was none.
        prefill_seconds: spent on the part of the prompt that wasn't cached.
        decode_seconds: spent on all tokens after the first.
        prefill_tokens_per_second: computed prompt tokens / `prefill_seconds`; 0 if nothing was computed.
        decode_tokens_per_second: tokens after the first / `decode_seconds`; 0 if there were none.
        peak_memory_bytes: the most that this process ever held resident, mapped weights included.
    """

    ttft: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one more token brought; `str` of it is its text.

    Attributes:
        text: more of the answer, often empty.
        reasoning: more of the thought.
        tool_calls: calls that are now complete.
        token_ids: the token; none in a last chunk that only flushes text.
        logprobs: one for each token, if asked for.
        finish_reason: set in the last chunk.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Result:
    """A finished answer; `str` of it is its text.

    Attributes:
        text: the answer for the reader, without thought, calls and stop string.
        token_ids: everything generated, end token included: prompt and these make the next state.
        reasoning: the thought, or None if there was none.
        tool_calls: what the model asks to be called, in order.
        finish_reason: ``"stop"`` (end token or stop string), ``"length"`` (max_tokens or context),
            ``"tool_calls"`` (ended with at least one call) or ``"cancelled"``.
        usage: counted tokens.
        timings: how long it took.
        seed: that the draws came from; given again, it repeats them.
        logprobs: one for each of `token_ids`, or None if not asked for.
        stop: the stop string that was met, or None.
        others: the other answers, if ``n`` asked for several.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    seed: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop: str | None = None
    others: tuple[Result, ...] = field(default=(), compare=False)

    @property
    def choices(self) -> tuple[Result, ...]:
        """This answer and, with ``n`` above 1, the others."""
        return (self, *self.others)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to append to a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 40 else self.text[:37] + "..."
        parts = [repr(shown), f"{self.usage.completion_tokens} tokens", self.finish_reason]
        if self.tool_calls:
            parts.append(f"calls {', '.join(call.name for call in self.tool_calls)}")
        if self.timings.decode_tokens_per_second:
            parts.append(f"{self.timings.decode_tokens_per_second:.1f} tok/s")
        return f"Result({', '.join(parts)})"

    def _repr_markdown_(self) -> str:
        parts = []
        if self.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in self.reasoning.splitlines()))
        if self.text:
            parts.append(self.text)
        for call in self.tool_calls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            parts.append(f"`{call.name}({arguments})`")
        return "\n\n".join(parts)
