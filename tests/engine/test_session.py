"""Sessions and stored states: what is reused, and that a warm result is the cold one bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from engine_support import END, IDS, Logits, Script, ids_of, load, scripted

import lily_py

NO_END: dict[str, Any] = {"logit_bias": {END: -1e4, IDS["<|endoftext|>"]: -1e4}}
GREEDY: dict[str, Any] = {"temperature": 0, **NO_END}


def cold(engine: lily_py.Engine, tokens: list[int]) -> Logits:
    """Logits after `tokens`, computed from nothing."""
    return engine.prefill(tokens)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def dense(folder: Path) -> Iterator[lily_py.Engine]:
    """An engine that takes snapshots every 16 tokens."""
    with load(folder, snapshot_interval=16) as engine:
        yield engine


def test_a_session_holds_its_tokens(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        assert (session.tokens, len(session)) == ([], 0)
        session.append(ids_of(20))
        session.append([3])
        assert session.tokens == [*ids_of(20), 3]
        result = session.generate(max_tokens=6, **GREEDY)
        assert session.tokens == [*ids_of(20), 3, *result.token_ids]
        np.testing.assert_array_equal(session.logits(), cold(engine, session.tokens))
        assert result.usage.cached_tokens == 21


def test_an_answer_goes_on_where_the_last_one_ended(engine: lily_py.Engine) -> None:
    whole = engine.generate(ids_of(20), max_tokens=12, **GREEDY).token_ids
    with engine.new_session() as session:
        session.append(ids_of(20))
        parts = [session.generate(max_tokens=4, **GREEDY) for _ in range(3)]
        assert tuple(token for part in parts for token in part.token_ids) == whole
        # Only the last token drawn had not been computed.
        assert parts[2].usage.prompt_tokens - parts[2].usage.cached_tokens == 1


def test_text_is_appended_as_it_is(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append("the ")
        session.append("cat")
        assert session.tokens == [*engine.tokenize("the "), *engine.tokenize("cat")]


@pytest.mark.parametrize("interval", [0, 16, 4096])
def test_rewind_goes_back_to_any_point(folder: Path, interval: int) -> None:
    with load(folder, snapshot_interval=interval) as engine, engine.new_session() as session:
        ids = ids_of(150)
        for to in (150, 149, 100, 64, 17, 16, 15, 1):
            session.rewind(0)
            session.append(ids)
            session.rewind(to)
            assert session.tokens == ids[:to]
            np.testing.assert_array_equal(session.logits(), cold(engine, ids[:to]))
        session.rewind(0)
        assert session.tokens == []
        with pytest.raises(lily_py.InvalidArgumentError, match="no tokens yet"):
            session.logits()
        with pytest.raises(lily_py.InvalidArgumentError, match="no tokens yet"):
            session.generate()


def test_truncate_counts_from_the_end(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(30))
        session.truncate(7)
        assert session.tokens == ids_of(30)[:23]
        session.truncate(0)
        assert len(session) == 23


def test_forks_go_their_own_ways(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(70))
        with session.fork() as other:
            session.append([1, 2, 3])
            other.append([9, 8])
            assert other.tokens == [*ids_of(70), 9, 8]
            np.testing.assert_array_equal(session.logits(), cold(engine, [*ids_of(70), 1, 2, 3]))
            np.testing.assert_array_equal(other.logits(), cold(engine, [*ids_of(70), 9, 8]))
        session.rewind(70)
        np.testing.assert_array_equal(session.logits(), cold(engine, ids_of(70)))


def test_conversations_keep_messages(engine: lily_py.Engine) -> None:
    with engine.new_session(thinking=False) as session:
        first = session.generate("Hello", logits_processors=scripted(engine, "Hi."))
        assert first.text == "Hi."
        session.append([user("Again")])
        second = session.generate(logits_processors=scripted(engine, "Hi again."))
        assert [message["content"] for message in session.messages] == ["Hello", "Hi.", "Again", "Hi again."]
        # The conversation in full, without a session, is the same prompt.
        assert second.usage.prompt_tokens == engine.count_tokens(
            [user("Hello"), first.message, user("Again")], thinking=False
        )
        assert second.usage.cached_tokens > 0
        session.rewind(messages=2)
        assert [message["content"] for message in session.messages] == ["Hello", "Hi."]
        third = session.generate("Other", max_tokens=6, **GREEDY)
        engine._runtime.store.clear()
        alone = engine.chat(
            [user("Hello"), first.message, user("Other")], thinking=False, max_tokens=6, **GREEDY
        )
        assert third.token_ids == alone.token_ids


def test_a_conversation_may_begin_or_end_without_a_question() -> None:
    """As its template refuses it: a system prompt alone is computed, and what is left after going back."""
    system = {"role": "system", "content": "You are a lily. " * 5}
    with load(Path(lily_py.__file__).parent / "demo") as engine, engine.new_session() as session:
        session.append([system])
        begun = session.tokens
        text = engine.apply_template([system, user("Hi")])
        assert engine.detokenize(begun, skip_special=False) == text[: text.index("<|im_start|>user")]
        np.testing.assert_array_equal(session.logits(), engine.prefill(begun))
        first = session.generate("Hi", max_tokens=5, seed=1)
        assert first.usage.cached_tokens == len(begun)
        session.rewind(messages=1)
        assert (session.tokens, session.messages) == (begun, [system])
        assert session.generate("Hi", max_tokens=5, seed=1).token_ids == first.token_ids
        session.rewind(messages=1)
        with pytest.raises(lily_py.TemplateError, match="no user query"):
            session.generate()
        with pytest.raises(lily_py.TemplateError, match="nobody"):
            session.append([{"role": "nobody", "content": "x"}])
        assert session.tokens == begun


def test_tokens_and_messages_are_not_mixed(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append([user("Hello")])
        before = session.tokens
        for content in ([1, 2], "text"):
            with pytest.raises(lily_py.InvalidArgumentError, match="holds messages"):
                session.append(content)
        assert session.tokens == before
        session.rewind(3)
        assert session.messages == []
        with pytest.raises(lily_py.InvalidArgumentError, match="holds plain tokens"):
            session.append([user("Hello")])
        session.append([1, 2])
        assert len(session) == 5


def test_impossible_rewinds_are_refused(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(5))
        for wrong in (-1, 6, 1.5, True, None):
            with pytest.raises(lily_py.InvalidArgumentError):
                session.rewind(wrong)
        with pytest.raises(lily_py.InvalidArgumentError, match="exactly one"):
            session.rewind(1, messages=1)
        with pytest.raises(lily_py.InvalidArgumentError, match="count must be between 0 and 5"):
            session.truncate(6)
        assert len(session) == 5


def test_a_session_that_answers_is_busy(engine: lily_py.Engine) -> None:
    session = engine.new_session()
    session.append(ids_of(5))
    stream = session.stream(max_tokens=100, **NO_END)
    next(stream)
    for call in (session.logits, session.fork, session.generate, lambda: session.append([1])):
        with pytest.raises(lily_py.LilyError, match="in use"):
            call()
    stream.close()
    assert len(session) == 6
    session.close()
    session.close()
    with pytest.raises(lily_py.LilyError, match="closed"):
        session.append([1])
    assert repr(session) == "Session(closed)"


def test_dropping_the_stream_frees_its_session(engine: lily_py.Engine) -> None:
    gc.disable()  # it mustn't take a collection
    try:
        with engine.new_session() as session:
            session.append(ids_of(5))
            for _ in session.stream(max_tokens=100, **NO_END):
                break
            assert len(session) == 6
            assert session.generate([7], max_tokens=2, **NO_END).usage.completion_tokens == 2
    finally:
        gc.enable()


def test_closing_a_session_ends_its_answer(engine: lily_py.Engine) -> None:
    session = engine.new_session()
    session.append(ids_of(5))
    stream = session.stream(max_tokens=100, **NO_END)
    next(stream)
    session.close()
    assert stream.result.finish_reason == "cancelled"


def test_a_failed_append_changes_nothing(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(5))
        with pytest.raises(lily_py.InvalidArgumentError):
            session.append([1, 2, 999])
        with pytest.raises(lily_py.UnknownKeywordError):
            session.generate([7], temp=1)  # type: ignore[call-arg]
        with pytest.raises(lily_py.InvalidArgumentError):
            session.generate([7], temperature=-1)
        with pytest.raises(lily_py.ContextLengthError):
            session.generate([7], max_tokens=10**6)
        assert session.tokens == ids_of(5)
        np.testing.assert_array_equal(session.logits(), cold(engine, ids_of(5)))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_cancelled_answer_leaves_what_was_said(engine: lily_py.Engine, after: int) -> None:
    with engine.new_session() as session:
        session.append(ids_of(30))
        stream = session.stream(max_tokens=100, **GREEDY)
        for _ in range(after):
            next(stream)
        stream.cancel()
        list(stream)
        assert session.tokens == [*ids_of(30), *stream.result.token_ids]
        assert len(stream.result.token_ids) == after
        np.testing.assert_array_equal(session.logits(), cold(engine, session.tokens))


def test_a_cancelled_prefill_leaves_a_usable_session(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        stream = session.stream(ids_of(3000), progress=lambda done, total: stream.cancel(), max_tokens=5)
        assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
        assert session.tokens == ids_of(3000)
        np.testing.assert_array_equal(session.logits(), cold(engine, ids_of(3000)))


def test_an_interrupted_append_changes_nothing(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(40))
        forward = session._state.advance  # type: ignore[union-attr]

        def interrupted(*args: Any, **keywords: Any) -> Any:
            keywords["progress"] = lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt)
            return forward(*args, **keywords)

        session._state.advance = interrupted  # type: ignore[method-assign, union-attr]
        with pytest.raises(KeyboardInterrupt):
            session.append(ids_of(2000, seed=1))
        del session._state.advance  # type: ignore[union-attr]
        assert session.tokens == ids_of(40)
        np.testing.assert_array_equal(session.logits(), cold(engine, ids_of(40)))


# ---- what engine calls reuse by themselves


def test_b21_an_exact_repeat_costs_one_step_and_gives_the_same(engine: lily_py.Engine) -> None:
    for prompt in ([7], ids_of(2), ids_of(65), "hello there"):
        engine._runtime.store.clear()
        first = engine.generate(prompt, max_tokens=12, **GREEDY)
        again = engine.generate(prompt, max_tokens=12, **GREEDY)
        assert again.token_ids == first.token_ids
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
        sampled = [engine.generate(prompt, seed=4, max_tokens=12, **NO_END).token_ids for _ in range(2)]
        assert sampled[0] == sampled[1]


@pytest.mark.parametrize("split", [1, 2, 15, 16, 17, 63, 64, 65, 100, 129])
def test_b22_warm_is_cold_for_every_split(dense: lily_py.Engine, split: int) -> None:
    prefix, suffix = ids_of(130)[:split], ids_of(40, seed=split)
    dense.generate(ids_of(130), max_tokens=5, **GREEDY)
    warm = dense.generate([*prefix, *suffix], max_tokens=16, **GREEDY)
    dense._runtime.store.clear()
    expected = dense.generate([*prefix, *suffix], max_tokens=16, **GREEDY)
    assert warm.token_ids == expected.token_ids
    assert expected.usage.cached_tokens == 0
    # From the nearest snapshot on, at most one interval is computed again (random tokens may agree further).
    assert split - 16 < max(warm.usage.cached_tokens, 1) <= split + 1


@pytest.mark.parametrize("distance", [3, 50, 500])
def test_b23_changing_a_token_in_the_middle(dense: lily_py.Engine, distance: int) -> None:
    prompt = ids_of(600)
    dense.generate(prompt, max_tokens=5, **GREEDY)
    edited = list(prompt)
    edited[-distance] = (edited[-distance] + 1) % 256
    warm = dense.generate(edited, max_tokens=16, **GREEDY)
    assert 600 - distance - 16 <= warm.usage.cached_tokens <= 600 - distance
    dense._runtime.store.clear()
    assert dense.generate(edited, max_tokens=16, **GREEDY).token_ids == warm.token_ids


def test_b23_truncating_and_regenerating(dense: lily_py.Engine) -> None:
    messages = [user("first question"), {"role": "assistant", "content": "an answer"}, user("second")]
    first = dense.chat(messages, max_tokens=10, **GREEDY)
    again = dense.chat(messages, max_tokens=10, seed=8, **NO_END)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    shorter = dense.chat(messages[:1], max_tokens=10, **GREEDY)
    assert shorter.usage.cached_tokens > 0
    dense._runtime.store.clear()
    assert dense.chat(messages[:1], max_tokens=10, **GREEDY).token_ids == shorter.token_ids
    dense._runtime.store.clear()
    assert dense.chat(messages, max_tokens=10, **GREEDY).token_ids == first.token_ids


def test_the_next_turn_costs_only_what_is_new(engine: lily_py.Engine) -> None:
    messages = [user("x" * 200)]
    first = engine.chat(messages, logits_processors=scripted(engine, "thought\n</think>\n\nanswer"))
    follow_up = [*messages, first.message, user("more")]
    second = engine.chat(follow_up, max_tokens=8, **GREEDY)
    # The template drops the thought, so that the turn before it is where the prompts part.
    boundary = engine.count_tokens(messages) - engine.tokenize(
        engine.apply_template(messages), special_tokens=True
    )[::-1].index(IDS["<|im_start|>"])
    assert second.usage.cached_tokens >= boundary - 1
    assert second.usage.cached_tokens >= 200
    engine._runtime.store.clear()
    assert engine.chat(follow_up, max_tokens=8, **GREEDY).token_ids == second.token_ids


def test_a_tool_loop_costs_only_what_is_new_though_old_thoughts_go() -> None:
    """The wire format: within a turn thoughts stay, and a new question drops those of the turn before."""
    tools = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}]
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    messages: list[dict[str, Any]] = [user("Will it rain? " * 5)]
    with load(Path(lily_py.__file__).parent / "demo") as engine:

        def ask(answer: str) -> tuple[lily_py.Result, int]:
            """The result, and the length of the prompt up to the answer's turn."""
            script = Script(engine.tokenize(f"{answer}<|im_end|>", special_tokens=True))
            result = engine.chat(messages, tools=tools, logits_processors=[script], top_logprobs=1)
            opened = len(engine.tokenize("<|im_start|>assistant\n<think>\n", special_tokens=True))
            messages.append(result.message)
            return result, result.usage.prompt_tokens - opened

        first, before_answers = ask(f"I look it up.\n</think>\n\n{call}")
        messages.append({"role": "tool", "content": "wet " * 20})
        second, _ = ask(f"Once more.\n</think>\n\n{call}")
        messages.append({"role": "tool", "content": "dry " * 20})
        third, _ = ask("It is dry.\n</think>\n\nNo.")
        for before, after in ((first, second), (second, third)):
            known = before.usage.prompt_tokens + before.usage.completion_tokens
            assert after.usage.cached_tokens == known - 1  # its end token alone hasn't been computed
        messages.append(user("Thanks"))
        fourth, _ = ask("Bye.\n</think>\n\nBye.")
        assert fourth.usage.cached_tokens == before_answers
        engine._runtime.store.clear()
        del messages[-1]
        again, _ = ask("Bye.\n</think>\n\nBye.")
        assert again.usage.cached_tokens == 0
        assert again.logprobs == fourth.logprobs


def test_two_conversations_share_their_system_prompt(engine: lily_py.Engine) -> None:
    system = {"role": "system", "content": "You are a lily. " * 20}
    engine.chat([system, user("one")], max_tokens=4, **GREEDY)
    second = engine.chat([system, user("two, quite different")], max_tokens=4, **GREEDY)
    assert second.usage.cached_tokens >= len(engine.tokenize(system["content"]))


def test_sessions_feed_the_store_too(engine: lily_py.Engine) -> None:
    with engine.new_session() as session:
        session.append(ids_of(80))
        assert engine.generate([*ids_of(80), 5], max_tokens=2, **GREEDY).usage.cached_tokens == 80
    assert engine.generate([*ids_of(80), 6], max_tokens=2, **GREEDY).usage.cached_tokens == 80


def test_a_second_session_with_the_same_content_costs_one_step(engine: lily_py.Engine) -> None:
    for content in (ids_of(90), "some text", [user("a question about a long document")]):
        with engine.new_session() as first, engine.new_session() as second:
            first.append(content)
            steps = Mock()
            second.append(content, progress=steps)
            steps.assert_called_once_with(1, 1)
            np.testing.assert_array_equal(first.logits(), second.logits())


def test_live_sessions_lend_what_the_store_had_no_room_for(folder: Path) -> None:
    with load(folder, cache_bytes=1) as engine:

        def cached(tokens: list[int], last: int) -> int:
            result = engine.generate([*tokens, last], max_tokens=2, top_logprobs=1, **GREEDY)
            assert result.logprobs is not None
            assert result.logprobs[0].top[0].token_id == int(np.argmax(engine.prefill([*tokens, last])))
            return result.usage.cached_tokens

        session = engine.new_session()
        session.append(ids_of(80))
        assert len(engine._runtime.store) == 0
        assert cached(ids_of(80), 1) == 80
        # Also while it answers, and after: its last snapshot is what they begin with.
        stream = session.stream([3], max_tokens=20, **GREEDY)
        next(stream)
        assert cached(ids_of(80), 2) == 80
        stream.finish()
        answered = session.tokens
        assert cached(answered, 5) == len(answered) - 1
        # What a session gave up isn't kept for others; a fork keeps its own.
        fork = session.fork()
        session.rewind(0)
        assert cached(answered, 6) == len(answered) - 1
        fork.close()
        assert cached(answered, 7) == 0
        session.append(ids_of(40))
        assert cached(ids_of(40), 4) == 40
        session.close()
        del session, fork, stream
        assert cached(ids_of(40), 5) == 0


def test_without_a_cache_nothing_is_reused_and_all_is_the_same(folder: Path, engine: lily_py.Engine) -> None:
    with load(folder, cache_bytes=0) as plain:
        for _ in range(2):
            result = plain.generate(ids_of(50), max_tokens=10, **GREEDY)
            assert result.usage.cached_tokens == 0
            assert result.token_ids == engine.generate(ids_of(50), max_tokens=10, **GREEDY).token_ids
        assert plain.info().cache_used == 0
        with plain.new_session() as session:
            session.append(ids_of(50))
            session.rewind(20)
            np.testing.assert_array_equal(session.logits(), cold(plain, ids_of(50)[:20]))


def test_one_session_a_thread_many_threads(folder: Path) -> None:
    with load(folder, threads=2, snapshot_interval=16) as engine:
        failures: list[str] = []

        def run(seed: int) -> None:
            with engine.new_session() as session:
                session.append(ids_of(60))
                session.append(ids_of(20, seed=seed))
                session.generate(max_tokens=10, **GREEDY)
                session.rewind(70)
                warm = session.logits()
                if not np.array_equal(warm, expected[seed]):
                    failures.append(f"seed {seed}")

        expected = {seed: cold(engine, [*ids_of(60), *ids_of(20, seed=seed)][:70]) for seed in range(1, 7)}
        threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
