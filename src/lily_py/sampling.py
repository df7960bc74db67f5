"""What a caller may ask of a generation: keywords, their checks, and the checkpoint's defaults for them."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import numpy
from numpy.typing import NDArray

from lily_py import _core
from lily_py.errors import InvalidArgumentError, UnknownKeywordError
from lily_py.grammar import CONSTRAINT_NAMES, Constraint, read_constraint
from lily_py.speculation import MOST_DRAFT_TOKENS
from lily_py.text import StopStrings

LogitsProcessor = Callable[[list[int], NDArray[numpy.float32]], NDArray[numpy.float32]]
"""Takes all tokens so far and the logits [vocab]; returns the logits to draw from."""

MAX_TOP_LOGPROBS = 100
GREEDY_BELOW = 1e-5
"""Temperatures from here down are greedy: dividing by them leaves nothing but the best token anyway."""

_MAX_INTEGER = (1 << 31) - 1
_SPELLINGS = {
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "enable_thinking": "thinking",
    "num_return_sequences": "n",
    "logits_processor": "logits_processors",
    "chat_template_kwargs": "template_variables",
    "functions": "tools",
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "json_schema": "response_format",
    "random_seed": "seed",
    "num_speculative_tokens": "draft_tokens",
    "prompt_lookup_num_tokens": "draft_tokens",
    "num_pred_tokens": "draft_tokens",
}
_NO_REPLACEMENT = {
    "do_sample": "temperature=0 is greedy, anything above it samples",
    "stream": "generate(..., stream=True) and stream(...) are streams, this isn't the place to ask for one",
}


class Keywords(TypedDict, total=False):
    """Keywords of `generate`, `stream` and `chat`; None or absent is the default.

    Attributes:
        raw: continue a text as it is, control tokens in it recognised, instead of answering it.
        tools: function descriptions, in OpenAI's form or bare.
        thinking: ask for a thought or for none; by default the template decides.
        template_variables: anything else that the template knows, such as ``preserve_thinking``.
        progress: a bar for the prompt (True, False), or a function of (tokens done, tokens to do).
        response_format: ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema": {"name":
            ..., "schema": {...}}}``: the answer, after its thought, is a document of that kind.
        regex: the answer matches this expression, whole.
        grammar: the answer follows this grammar, in llguidance's variant of Lark.

    The others are those of `SamplingOptions`.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    top_logprobs: int | None
    n: int | None
    logits_processors: Sequence[LogitsProcessor] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    response_format: Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    draft_tokens: int | None
    raw: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    thinking: bool | None
    template_variables: Mapping[str, Any] | None
    progress: bool | Callable[[int, int], None] | None


@dataclass(frozen=True)
class SamplingOptions:
    """Checked options of one generation.

    Attributes:
        max_tokens: most tokens to generate; None for the rest of the context, at most
            `lily_py.engine.DEFAULT_MAX_TOKENS`.
        min_tokens: end tokens are not drawn before this many.
        temperature: 0 takes the most probable token, the lowest id among equals.
        top_p: keep the fewest tokens whose probability reaches this; at least one.
        top_k: keep this many tokens; 0, or the vocabulary and more, is off.
        min_p: drop tokens below this share of the best one's probability.
        repetition_penalty: divides (multiplies, if negative) logits of tokens seen before; 1 is off. This
            and the next two count the whole text, prompt included.
        presence_penalty: subtracted from the logits of tokens seen before.
        frequency_penalty: subtracted once for each time a token was seen.
        logit_bias: token -> what is added to its logit; -inf bans it.
        seed: of the random numbers, 0 to 2**64-1; None takes a new one from the operating system.
        stop: strings that end the answer and are not part of it.
        logprobs: keep the log probability of each token, by the model's own logits.
        top_logprobs: and those of the best tokens at each position.
        n: how many answers.
        logits_processors: applied in order to the logits of each step.
        xtc_probability: how often, after all other filters, the most probable tokens are left out
            ("exclude top choices").
        xtc_threshold: those of at least this probability, except the least probable of them; above 0.5
            it can't be two, and nothing happens.
        constraint: what the answer must follow.
        draft_tokens: most tokens to draft in a pass; 0 for no speculation, None for what the engine does.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    logits_processors: tuple[LogitsProcessor, ...] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    constraint: Constraint | None = None
    draft_tokens: int | None = None

    def make_sampler(self, seed: int, vocabulary: int) -> _core.Sampler:
        """Return a fresh native sampler.

        Args:
            seed: of its random numbers.
            vocabulary: ids from here on are never drawn.
        """
        sampler = _core.Sampler(
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_k=0 if self.top_k >= vocabulary else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
            vocabulary=vocabulary,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
        )
        sampler.keep_log_probabilities(self.logprobs)
        return sampler

    def differences(self) -> str:
        """Return the options that aren't neutral, as ``temperature=0.6 top_k=20``."""
        shown = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty")  # fmt: skip
        neutral = SamplingOptions(temperature=-1.0)
        return " ".join(
            f"{name}={getattr(self, name):g}"
            for name in shown
            if getattr(self, name) != getattr(neutral, name)
        )


OPTION_NAMES = (
    *(field.name for field in fields(SamplingOptions) if field.name != "constraint"),
    *CONSTRAINT_NAMES,
)


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> SamplingOptions:
    """Return a checkpoint's own defaults; ``do_sample: false`` is temperature 0."""
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip
    defaults = read_options(
        SamplingOptions(),
        {name: generation_config[name] for name in known if name in generation_config},
        1 << 31,
    )
    return replace(defaults, temperature=0.0) if generation_config.get("do_sample") is False else defaults


def refuse_unknown(keywords: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that every keyword is known.

    Raises:
        UnknownKeywordError: names the keyword and the nearest known one.
    """
    for name in keywords:
        if name in known:
            continue
        if name in _NO_REPLACEMENT:
            raise UnknownKeywordError(f"unknown keyword {name!r}: {_NO_REPLACEMENT[name]}")
        nearest = [_SPELLINGS[name]] if name in _SPELLINGS else difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(sorted(known))}"
        raise UnknownKeywordError(f"unknown keyword {name!r}: {hint}")


def read_options(defaults: SamplingOptions, given: Mapping[str, Any], vocabulary: int) -> SamplingOptions:
    """Check keywords of known names and lay them over the defaults; None leaves a default.

    Raises:
        InvalidArgumentError: names the keyword, its value and what is allowed.
    """
    values = {name: value for name, value in given.items() if value is not None}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in _NUMBERS:
            checked[name] = number(name, value, *_NUMBERS[name])
        elif name in _INTEGERS:
            checked[name] = integer(name, value, *_INTEGERS[name])
    if "top_logprobs" in checked:
        checked["logprobs"] = checked["top_logprobs"] > 0
    if "logprobs" in values:
        checked["logprobs"] = _logprobs(values["logprobs"], checked.get("top_logprobs", 0))
    if "logit_bias" in values:
        checked["logit_bias"] = _logit_bias(values["logit_bias"], vocabulary)
    if "stop" in values:
        stop = values["stop"]
        StopStrings(stop)
        checked["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "logits_processors" in values:
        checked["logits_processors"] = _processors(values["logits_processors"])
    checked["constraint"] = read_constraint(values)
    options = replace(defaults, **checked)
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidArgumentError(
            f"min_tokens must be at most max_tokens ({options.max_tokens}), got {options.min_tokens}"
        )
    return options


def new_seed() -> int:
    """Return an unpredictable seed."""
    return int.from_bytes(os.urandom(8), "little")


_NUMBERS = {
    "temperature": (0.0, 1000.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1000.0),
    "presence_penalty": (-1000.0, 1000.0),
    "frequency_penalty": (-1000.0, 1000.0),
}
_INTEGERS = {
    "max_tokens": (1, _MAX_INTEGER),
    "min_tokens": (0, _MAX_INTEGER),
    "top_k": (0, _MAX_INTEGER),
    "seed": (0, (1 << 64) - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "n": (1, 1024),
    "draft_tokens": (0, MOST_DRAFT_TOKENS),
}


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number within [low, high]; NaN, text and booleans are refused.

    Raises:
        InvalidArgumentError: names the argument, its value and the range.
    """
    if isinstance(value, bool | numpy.bool_ | str) or not hasattr(value, "__float__"):
        raise InvalidArgumentError(f"{name} must be a number, got {value!r}")
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"{name} must be a number, got {value!r}") from error
    if not low <= result <= high:
        raise InvalidArgumentError(f"{name} must be between {low:g} and {high:g}, got {value!r}")
    return result


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Return a whole number within [low, high]; floats, text and booleans are refused.

    Raises:
        InvalidArgumentError: names the argument, its value and the range.
    """
    if isinstance(value, bool | numpy.bool_) or not hasattr(value, "__index__"):
        raise InvalidArgumentError(f"{name} must be a whole number, got {value!r}")
    try:
        result = int(value.__index__())
    except TypeError as error:
        raise InvalidArgumentError(f"{name} must be a whole number, got {value!r}") from error
    if not low <= result <= high:
        raise InvalidArgumentError(f"{name} must be between {low} and {high}, got {value!r}")
    return result


def boolean(name: str, value: Any) -> bool:
    """Return a truth value; anything but True and False is refused.

    Raises:
        InvalidArgumentError: names the argument and its value.
    """
    if not isinstance(value, bool | numpy.bool_):
        raise InvalidArgumentError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _logprobs(value: Any, top: int) -> bool:
    if not isinstance(value, bool | numpy.bool_):
        raise InvalidArgumentError(
            f"logprobs must be True or False, got {value!r}; top_logprobs says how many alternatives to keep"
        )
    if top and not value:
        raise InvalidArgumentError(f"top_logprobs={top} needs logprobs=True, got False")
    return bool(value)


def _logit_bias(value: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(
            f"logit_bias must be a mapping of token ids to numbers, got {type(value).__name__}"
        )
    result = []
    for token, bias in value.items():
        # JSON has only text for keys; Python converts no endless ones.
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        token = integer("logit_bias: a token id", token, 0, vocabulary - 1)
        if isinstance(bias, float) and bias == -math.inf:
            result.append((token, bias))
        else:
            result.append((token, number(f"logit_bias[{token}]", bias, -1e4, 1e4)))
    return tuple(result)


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    if callable(value) or not isinstance(value, Sequence) or not all(callable(item) for item in value):
        raise InvalidArgumentError(
            f"logits_processors must be a list of functions of (tokens, logits), got {value!r}"
        )
    return tuple(value)
