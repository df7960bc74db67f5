"""8-bit keys and values: stored as documented, the same bits everywhere, as accurate as rounding allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_support import ALL_SHAPES, INSTRUCTION_SETS, Ids, Tiny, feed, ids_of, model_of, run, state_bytes
from numpy.typing import NDArray
from oracles.result import Result
from oracles.shapes import SHAPES
from tokenizers import Tokenizer

import lily_py
from lily_py import _core
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError
from lily_py.loader import load_model

DEMO = Path(lily_py.__file__).parent / "demo"
QUESTIONS = Path(__file__).parent.parent / "demo" / "questions.json"
ReferenceOf = Callable[[Path, Ids], Result]
BLOCK = 64  # numbers of a key or a value that share a scale


def rounded_to_int8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [..., dim] as bytes times a scale for each 64: max|x| / 127; byte = rint(x * (127 / max|x|))."""
    result = np.empty_like(x)
    for begin in range(0, x.shape[-1], BLOCK):
        block = x[..., begin : begin + BLOCK]
        top = np.abs(block).max(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
        result[..., begin : begin + BLOCK] = np.rint(block * inverse) * (top / np.float32(127))
    return result


def attention_of(name: str) -> list[bool]:
    return [ALL_SHAPES[name].is_attention(layer) for layer in range(ALL_SHAPES[name].layers)]


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@pytest.mark.parametrize("name", ["moe", "narrow", "head256"])
def test_stored_numbers_are_the_fp32_ones_rounded_as_documented(tiny: Tiny, name: str) -> None:
    """In the first attention layer, whose inputs no rounded number has reached yet; 48, 64, 256 wide."""
    path, ids, attention = tiny(ALL_SHAPES[name], "mlx-4bit-g64"), ids_of(200, 70), attention_of(name)
    single = run(model_of(path, kv_dtype="float32"), ids, attention)
    bytes_ = run(model_of(path, kv_dtype="int8"), ids, attention)
    first = attention.index(True)
    for kind in ("keys", "values"):
        expected = rounded_to_int8(getattr(single, kind)[first])
        np.testing.assert_array_equal(getattr(bytes_, kind)[first], expected)


def test_recurrent_layers_before_the_first_attention_are_not_touched(tiny: Tiny) -> None:
    path, ids, attention = tiny("moe", "mlx-4bit-g64"), ids_of(SHAPES["moe"].vocab, 70), attention_of("moe")
    single, bytes_ = (run(model_of(path, kv_dtype=kind), ids, attention) for kind in ("float32", "int8"))
    for layer in range(attention.index(True)):
        np.testing.assert_array_equal(bytes_.recurrent[layer], single.recurrent[layer])


@pytest.mark.parametrize("name", ["moe", "narrow", "kv_ratio12", "interval2"])
def test_chunks_threads_and_instruction_sets_give_the_same_bits(tiny: Tiny, name: str) -> None:
    path, ids, attention = tiny(ALL_SHAPES[name], "mlx-4bit-g64"), ids_of(200, 140), attention_of(name)

    def outcome(**options: Any) -> tuple[NDArray[np.float32], dict[str, bytes]]:
        model = model_of(path, kv_dtype="int8", **options)
        sequence = model.new_sequence()
        return feed(model, sequence, ids), state_bytes(sequence, attention)

    expected = outcome(chunk=512)
    variants: list[dict[str, Any]] = [{"chunk": 1}, {"chunk": 7}, {"chunk": 65}, {"threads": 3}]
    variants += [{"ablate": off} for off in INSTRUCTION_SETS.values()]
    for options in variants:
        logits, states = outcome(**options)
        np.testing.assert_array_equal(logits, expected[0], err_msg=str(options))
        assert states == expected[1], options


@pytest.mark.parametrize("name", ["moe", "interval2", "kv_ratio8", "head256"])
def test_the_loss_of_accuracy_is_that_of_rounding(tiny: Tiny, reference: ReferenceOf, name: str) -> None:
    """A byte is off by at most half a step of max / 127, 4e-3 of the largest number of 64.

    Attention averages that; measured on random weights, the divergence from exact keys and values is 1e-6 to
    1e-4 nats a token, of logits of size 4.
    """
    shape = SHAPES[name]
    path, ids = tiny(name, "mlx-4bit-g64"), ids_of(shape.vocab, 65)
    exact = log_softmax(np.asarray(reference(path, ids).logits, np.float64))
    model = model_of(path, kv_dtype="int8", ablate=("integer_dot",))
    ours = log_softmax(feed(model, model.new_sequence(), ids).astype(np.float64))
    divergence = float((np.exp(exact) * (exact - ours)).sum(-1).mean())
    print(f"{name}: {divergence:.2e} nats a token")
    assert 1e-9 < divergence < 1e-3


def test_it_takes_half_the_memory_of_bf16_and_its_scales(tiny: Tiny) -> None:
    path = tiny("moe", "mlx-4bit-g64")
    whole, half = (model_of(path, kv_dtype=kind).kv_bytes_per_token for kind in ("bfloat16", "int8"))
    dim = SHAPES["moe"].head_dim
    assert half * 2 * dim == whole * (dim + 4 * -(-dim // BLOCK))


def test_an_unknown_kind_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InvalidArgumentError, match="must be 'bfloat16', 'float32' or 'int8', got 'int4'"):
        model_of(tiny("moe", "mlx-4bit-g64"), kv_dtype="int4")


@pytest.fixture(scope="module")
def texts() -> list[Ids]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    questions = json.loads(QUESTIONS.read_text())
    written = [
        "".join(m.get("content") or "" for q in questions[i::8] for m in q["messages"]) for i in range(8)
    ]
    return [np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32) for text in written]


@pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="the demo model is not there")
def test_the_demo_model_hardly_notices(texts: list[Ids]) -> None:
    """Distributions beside those with fp32 keys and values, everything else equal.

    Divergence is the measure: a perplexity over 1,355 positions is itself uncertain by 0.1 to 0.2 %. It must
    stay within four standard errors.
    """

    def rows_of(kv_dtype: str) -> NDArray[np.float64]:
        model: _core.Model = load_model(open_checkpoint(DEMO), kv_dtype=kv_dtype, threads=1)
        return np.concatenate(
            [log_softmax(feed(model, model.new_sequence(), ids)[:-1].astype(np.float64)) for ids in texts]
        )

    following = np.concatenate([ids[1:] for ids in texts])
    exact = rows_of("float32")
    for kind in ("bfloat16", "int8"):
        rows = rows_of(kind)
        divergence = float((np.exp(exact) * (exact - rows)).sum(-1).mean())
        same = float((exact.argmax(-1) == rows.argmax(-1)).mean())
        loss = (exact - rows)[np.arange(len(rows)), following]
        error = float(loss.std() / np.sqrt(len(loss)))
        print(
            f"{kind}: {len(rows)} positions, {divergence:.2e} nats a token, same top token {same:.2%}, "
            f"perplexity {np.expm1(loss.mean()):+.3%} (uncertain by {error:.3%})"
        )
        assert 0 < divergence < 0.003
        assert same > 0.985
        assert abs(loss.mean()) < 4 * error
