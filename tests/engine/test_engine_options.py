"""Keywords of a generation: unknown ones are refused with a suggestion, values are checked, defaults hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Tiny, copy_with, ids_of, load

import lily_py
from lily_py.sampling import SamplingOptions, checkpoint_defaults, read_options

VOCABULARY = 320


def read(**keywords: Any) -> SamplingOptions:
    return read_options(SamplingOptions(), keywords, VOCABULARY)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temp", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("top_P", "top_p"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_sequences", "stop"),
        ("enable_thinking", "thinking"),
        ("sede", "seed"),
    ],
)
def test_unknown_keyword_is_a_type_error_that_suggests_the_nearest(
    engine: lily_py.Engine, wrong: str, right: str
) -> None:
    for call in (engine.generate, engine.stream, engine.new_session().generate):
        with pytest.raises(lily_py.UnknownKeywordError, match=f"{wrong}.*{right}") as error:
            call([1, 2], **{wrong: 1})  # type: ignore[operator]
        assert isinstance(error.value, TypeError)


def test_keyword_without_equivalent_says_what_to_use(engine: lily_py.Engine) -> None:
    with pytest.raises(lily_py.UnknownKeywordError, match="temperature=0 is greedy"):
        engine.generate([1], do_sample=False)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "between 0 and 1000"),
        ("temperature", math.nan, "between"),
        ("temperature", math.inf, "between"),
        ("temperature", "0.7", "number"),
        ("temperature", True, "number"),
        ("temperature", [0.7], "number"),
        ("top_p", 1.01, "between 0 and 1"),
        ("top_p", math.nan, "between"),
        ("min_p", -1, "between 0 and 1"),
        ("top_k", -1, "between 0"),
        ("top_k", 1.5, "whole"),
        ("max_tokens", 0, "between 1"),
        ("max_tokens", -5, "between 1"),
        ("max_tokens", 10.0, "whole"),
        ("max_tokens", "10", "whole"),
        ("min_tokens", -1, "between 0"),
        ("repetition_penalty", 0, "between 0.001"),
        ("repetition_penalty", math.nan, "between"),
        ("presence_penalty", math.inf, "between"),
        ("frequency_penalty", "much", "number"),
        ("seed", -1, "between 0"),
        ("seed", 1 << 64, "between 0"),
        ("seed", 0.5, "whole"),
        ("top_logprobs", 101, "between 0 and 100"),
        ("logprobs", 5, "True or False"),
        ("n", 0, "between 1"),
        ("logit_bias", [(1, 2)], "mapping"),
        ("logit_bias", {1: math.nan}, "between"),
        ("logit_bias", {1: math.inf}, "between"),
        ("logit_bias", {VOCABULARY: 1}, "between 0 and 319"),
        ("logit_bias", {-1: 1}, "between 0"),
        ("logit_bias", {"a": 1}, "whole"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", [1], "string"),
        ("stop", 3, "string"),
        ("logits_processors", lambda ids, logits: logits, "list of functions"),
        ("logits_processors", [3], "list of functions"),
    ],
)
def test_b18_impossible_value_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match=name.split("[")[0]) as error:
        read(**{name: value})
    assert allowed in str(error.value)


def test_b18_none_is_the_default() -> None:
    defaults = SamplingOptions(temperature=0.6, top_k=20)
    nothing = dict.fromkeys((*SamplingOptions.__dataclass_fields__,), None)
    assert read_options(defaults, nothing, VOCABULARY) == defaults


def test_numbers_of_numpy_are_numbers() -> None:
    options = read(temperature=np.float32(0.5), top_k=np.int64(7), logit_bias={np.int32(3): np.float64(1.5)})
    assert (options.temperature, options.top_k, options.logit_bias) == (0.5, 7, ((3, 1.5),))


def test_token_ids_of_json_are_text_and_bans_are_minus_infinity() -> None:
    assert read(logit_bias={"12": -math.inf}).logit_bias == ((12, -math.inf),)


def test_contradictions_are_refused() -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="min_tokens must be at most max_tokens"):
        read(min_tokens=5, max_tokens=4)
    with pytest.raises(lily_py.InvalidArgumentError, match="top_logprobs=3 needs logprobs=True"):
        read(logprobs=False, top_logprobs=3)


def test_top_logprobs_alone_asks_for_logprobs() -> None:
    assert read(top_logprobs=3).logprobs
    assert not read(top_logprobs=0).logprobs


def test_defaults_come_from_the_generation_config(engine: lily_py.Engine) -> None:
    for part in ("temperature=1", "top_p=0.95", "top_k=20"):
        assert part in repr(engine)


def test_do_sample_false_is_greedy(tiny: Tiny, tmp_path: Path, folder: Path) -> None:
    changed = copy_with(folder, tmp_path / "greedy", generation_config={"do_sample": False})
    with load(changed) as engine:
        assert "temperature=0" in repr(engine)
        first, second = (engine.generate(ids_of(20), max_tokens=16) for _ in range(2))
        assert first.token_ids == second.token_ids
        assert first.token_ids == engine.generate(ids_of(20), max_tokens=16, temperature=0).token_ids


def test_explicit_values_win_over_the_checkpoints() -> None:
    defaults = checkpoint_defaults({"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05})
    options = read_options(defaults, {"temperature": 0.0}, VOCABULARY)
    assert (options.temperature, options.top_p, options.repetition_penalty) == (0.0, 0.95, 1.05)
