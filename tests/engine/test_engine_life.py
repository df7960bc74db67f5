"""Loading, closing, forking, pickling; what an engine says about itself; threads and async."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import END, ids_of, load

import lily_py

NO_END: dict[str, Any] = {"logit_bias": {END: -1e4, END - 2: -1e4}}


def test_repr_is_one_line(folder: Path) -> None:
    with load(folder) as engine:
        assert repr(engine).startswith(f"Engine('{folder}', qwen3_5_moe, 4 layers, cpu")
        assert "\n" not in repr(engine)
        assert "context 4096" in repr(engine)
    assert repr(engine) == f"Engine('{folder}', closed)"


def test_info_gives_sizes(engine: lily_py.Engine, folder: Path) -> None:
    info = engine.info()
    # One attention layer of 2 KV heads of 64, keys and values, 2 bytes each.
    assert info.kv_per_token == 2 * 2 * 64 * 2
    # Three GDN layers: 4 heads of 32 x 32, and 3 inputs of 256 channels; fp32.
    assert info.recurrent_state == 3 * (4 * 32 * 32 + 3 * 256) * 4
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.9 * files < info.weights <= files
    assert info.memory_per_context == {4096: info.weights + 4096 * info.kv_per_token + info.recurrent_state}
    assert (info.layers, info.attention_layers, info.experts, info.experts_per_token) == (4, 1, 8, 2)
    assert "KV per token" in str(info)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cuda"}, "backend must be one of auto, cpu, metal, got 'cuda'"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of bfloat16, float32, int8, got 'int4'"),
        ({"threads": 0}, "threads must be between 1 and 1024, got 0"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"max_context": 0}, "max_context must be between 1 and 4096, got 0"),
        ({"max_context": 5000}, "max_context must be between 1 and 4096, got 5000"),
        ({"memory_limit": "lots"}, "memory_limit must be a size such as"),
        ({"memory_limit": -1}, "memory_limit must be a number"),
        ({"memory_limit": True}, "memory_limit must be a number"),
        ({"cache_bytes": float("nan")}, "cache_bytes must be a number"),
        ({"snapshot_interval": -1}, "snapshot_interval must be between"),
    ],
)
def test_impossible_load_options_are_refused(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(lily_py.InvalidArgumentError) as error:
        load(folder, **options)
    assert message in str(error.value)


def test_missing_checkpoint_is_named() -> None:
    with pytest.raises(lily_py.CheckpointNotFoundError, match="/no/such/folder"):
        lily_py.Engine.load("/no/such/folder")
    with pytest.raises(FileNotFoundError):
        lily_py.Engine.load("/no/such/folder")


def test_close_is_idempotent_and_later_calls_say_so(folder: Path) -> None:
    engine = load(folder)
    session = engine.new_session()
    session.append(ids_of(4))
    stream = engine.stream(ids_of(5), **NO_END)
    next(stream)
    engine.close()
    engine.close()
    assert engine.closed
    assert stream.result.finish_reason == "cancelled"
    calls = [
        lambda: engine.generate("x"),
        lambda: engine.stream("x"),
        lambda: engine.prefill([1]),
        lambda: engine.decode_step(1),
        lambda: engine.tokenize("x"),
        lambda: engine.detokenize([1]),
        lambda: engine.count_tokens("x"),
        lambda: engine.apply_template([{"role": "user", "content": "x"}]),
        lambda: engine.info(),
        lambda: engine.new_session(),
        lambda: session.append([1]),
        lambda: session.generate(),
        lambda: session.tokens,
        lambda: asyncio.run(engine.agenerate("x")),
    ]
    for call in calls:
        with pytest.raises(lily_py.EngineClosedError):
            call()


def test_b30_closing_frees_the_model(folder: Path) -> None:
    engine = load(folder)
    engine.generate(ids_of(10), max_tokens=4, **NO_END)
    session = engine.new_session()
    session.append(ids_of(10))
    model = weakref.ref(engine._runtime)
    engine.close()
    assert engine._runtime._model is None
    assert len(engine._runtime.store) == 0
    del engine, session
    gc.collect()
    assert model() is None


def test_pickling_and_copying_are_refused(engine: lily_py.Engine) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(lily_py.InvalidArgumentError, match="can't be pickled or copied"):
            attempt(engine)


FORK = """
import os, sys, lily_py
engine = lily_py.Engine.load(sys.argv[1], threads=2)
engine.generate([1, 2, 3] * 50, max_tokens=3)
child = os.fork()
if child == 0:
    try:
        engine.generate([1, 2, 3])
    except lily_py.BackendError as error:
        print(error)
    sys.exit(7)  # an ordinary exit, with all destructors
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
print(engine.generate([1, 2, 3], max_tokens=2).finish_reason)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_is_told_and_exits_while_the_parent_goes_on(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    child, parent = run.stdout.splitlines()
    assert "can't be used in its fork" in child
    assert parent in ("length", "stop")


def test_an_abandoned_stream_makes_no_noise_at_exit(folder: Path) -> None:
    code = (
        "import sys, lily_py; e = lily_py.Engine.load(sys.argv[1], threads=1); "
        "s = e.stream([1, 2, 3]); next(s); t = e.new_session(); t.append([1, 2])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


def test_b30_load_in_one_thread_generate_in_others(folder: Path) -> None:
    loaded: list[lily_py.Engine] = []
    thread = threading.Thread(target=lambda: loaded.append(load(folder, threads=2)))
    thread.start()
    thread.join()
    engine = loaded[0]
    keywords: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, **NO_END}
    prompts = [ids_of(10 + 37 * i, seed=i) for i in range(4)]
    alone = [engine.generate(prompt, seed=i, **keywords).token_ids for i, prompt in enumerate(prompts)]
    engine._runtime.store.clear()
    together: dict[int, tuple[int, ...]] = {}

    def run(i: int) -> None:
        together[i] = engine.generate(prompts[i], seed=i, **keywords).token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone
    engine.close()


def test_a_long_prompt_does_not_hold_up_others(folder: Path) -> None:
    """After each piece of the prompt its reader waits for a token of somebody else."""
    with load(folder) as engine:
        pieces: queue.SimpleQueue[int] = queue.SimpleQueue()
        token, waits = threading.Semaphore(0), []

        def progress(done: int, total: int) -> None:
            pieces.put(done)
            waits.append(token.acquire(timeout=30))

        def read() -> None:
            engine.generate(ids_of(4000, seed=1), max_tokens=1, progress=progress)

        thread = threading.Thread(target=read)
        with engine.stream(ids_of(5), max_tokens=4000, **NO_END) as stream:
            next(stream)
            thread.start()
            while pieces.get(timeout=30) < 4000:
                next(stream)
                token.release()
            token.release()
        thread.join()
        assert len(waits) >= 8  # a piece has at most 512 tokens
        assert all(waits)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_requests_leave_no_memory_behind(folder: Path) -> None:
    with load(folder, cache_bytes="1MiB") as engine:

        def requests(count: int) -> None:
            for i in range(count):
                engine.generate(ids_of(70, seed=i), max_tokens=4, **NO_END)
                with engine.new_session() as session:
                    session.append(ids_of(5, seed=i))
                    session.fork().close()

        requests(50)
        before = resident_bytes()
        requests(300)
        # One request's state is a hundred KiB and more: hundreds of them kept would show.
        assert resident_bytes() - before < 8 << 20


def test_the_state_of_an_answer_goes_with_its_end(folder: Path) -> None:
    """At once, without a garbage collection, and however long its stream is kept."""
    with load(folder, cache_bytes=0) as engine:
        gc.collect()
        gc.disable()
        try:
            kept = []
            for i in range(4):
                kept.append(engine.stream(ids_of(70, seed=i), max_tokens=3, **NO_END))
                state = weakref.ref(kept[-1]._generation._state)  # type: ignore[union-attr]
                next(kept[-1])
                kept[-1].close() if i % 2 else kept[-1].finish()
                assert state() is None
            stream = engine.stream(ids_of(70), max_tokens=30, **NO_END)
            state = weakref.ref(stream._generation._state)  # type: ignore[union-attr]
            next(stream)
            del stream
            assert state() is None
            assert [len(each.result.token_ids) for each in kept] == [3, 1, 3, 1]
        finally:
            gc.enable()


def test_sessions_come_and_go_while_memory_is_counted(folder: Path) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with load(folder, memory_limit="200MB") as engine:

            def come_and_go() -> None:
                for _ in range(40):
                    sessions = [engine.new_session() for _ in range(30)]
                    assert engine.info().in_use > 0
                    sessions[0].append([1])

            with ThreadPoolExecutor(4) as pool:
                for each in [pool.submit(come_and_go) for _ in range(4)]:
                    each.result(60)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_b30_nothing_grows_over_a_thousand_requests_and_a_hundred_thousand_tokens(folder: Path) -> None:
    with load(folder, cache_bytes="2MiB", max_context=4096) as engine:

        def requests(count: int) -> int:
            tokens = 0
            for i in range(count):
                keywords: dict[str, Any] = {"seed": i, "temperature": 1.0, "max_tokens": 20, **NO_END}
                if i % 4 == 0:
                    keywords |= {"top_logprobs": 2, "stop": "zz"}
                if i % 50 == 0:
                    keywords |= {"max_tokens": 2000}
                stream = engine.stream(ids_of(40 + i % 90, seed=i % 7), **keywords)
                if i % 5 == 0:
                    next(stream)
                    stream.cancel()
                tokens += stream.finish().usage.total_tokens
            return tokens

        def held() -> tuple[int, int, int]:
            gc.collect()
            return resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()

        requests(300)
        before = held()
        assert requests(1000) >= 100_000
        after = held()
        assert after[0] - before[0] < 4 << 20
        assert after[1:] == before[1:]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_closing_while_others_generate_ends_them(folder: Path) -> None:
    engine = load(folder)
    begun = threading.Event()
    ends: list[str] = []

    def run() -> None:
        for chunk in engine.stream(ids_of(5), max_tokens=4000, **NO_END):
            begun.set()
            if chunk.finish_reason:
                ends.append(chunk.finish_reason)
        ends.append("over")

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert ends[-1] == "over"


def test_async_twins_agree_with_the_others(engine: lily_py.Engine) -> None:
    keywords: dict[str, Any] = {"seed": 5, "max_tokens": 20, "temperature": 1.0}
    expected = engine.generate("hello", **keywords)

    async def run() -> None:
        result = await engine.agenerate("hello", **keywords)
        assert result.token_ids == expected.token_ids
        async with engine.astream("hello", **keywords) as stream:
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert stream.result.token_ids == expected.token_ids
        both = await asyncio.gather(*(engine.agenerate("hello", **keywords) for _ in range(3)))
        assert {each.token_ids for each in both} == {expected.token_ids}
        many = await engine.agenerate("hello", n=2, **keywords)
        assert many.choices[0].token_ids == expected.token_ids
        with pytest.raises(lily_py.UnknownKeywordError):
            await engine.agenerate("hello", temp=1)
        with pytest.raises(lily_py.UnknownKeywordError):
            async for _ in engine.astream("hello", temp=1):
                pass

    asyncio.run(run())


def test_cancelling_a_task_ends_the_generation(engine: lily_py.Engine) -> None:
    async def run() -> None:
        stream = engine.astream(ids_of(5), max_tokens=3000, **NO_END)
        task = asyncio.create_task(stream.finish())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        assert stream.result.finish_reason == "cancelled"
        assert len(stream.result.token_ids) < 3000
        whole = asyncio.create_task(engine.agenerate(ids_of(5), max_tokens=3000, **NO_END))
        await asyncio.sleep(0.05)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole

    asyncio.run(run())


def test_many_answers_at_once_leave_a_stream_its_turn(engine: lily_py.Engine) -> None:
    """More answers than the event loop has threads, none of which ends before the stream has."""
    streamed = threading.Event()

    def wait(_: list[int], logits: np.ndarray) -> np.ndarray:
        assert streamed.wait(60)
        return logits

    async def run() -> None:
        answers = [
            asyncio.create_task(engine.agenerate(ids_of(4, seed=i), max_tokens=2, logits_processors=[wait]))
            for i in range(64)
        ]
        await asyncio.sleep(0)
        stream = engine.astream(ids_of(5), max_tokens=8, **NO_END)
        assert len((await asyncio.wait_for(stream.finish(), 30)).token_ids) == 8
        streamed.set()
        await asyncio.gather(*answers)

    asyncio.run(run())


def test_a_response_whose_reader_leaves_ends_the_generation(engine: lily_py.Engine) -> None:
    """As web frameworks do it: an asynchronous generator over the stream, closed in the middle."""

    async def body() -> AsyncIterator[str]:
        async for chunk in engine.astream(ids_of(5), max_tokens=3000, **NO_END):
            yield chunk.text

    async def run() -> None:
        response = body()
        await anext(response)
        assert any(not stream.ended for stream in engine._runtime.streams)
        await response.aclose()

    asyncio.run(run())
    assert all(stream.ended for stream in engine._runtime.streams)


def test_the_event_loop_stays_free(engine: lily_py.Engine) -> None:
    async def run() -> int:
        ticks = 0
        task = asyncio.create_task(engine.agenerate(ids_of(3000), max_tokens=500, **NO_END))
        while not task.done():
            await asyncio.sleep(0.002)
            ticks += 1
        await task
        return ticks

    assert asyncio.run(run()) > 5


def test_logits_are_the_callers_own(engine: lily_py.Engine) -> None:
    logits = engine.prefill([1, 2, 3])
    kept = logits.copy()
    logits[:] = np.nan
    np.testing.assert_array_equal(engine.prefill([1, 2, 3]), kept)
    with engine.new_session() as session:
        session.append([1, 2, 3])
        session.logits()[:] = np.nan
        np.testing.assert_array_equal(session.logits(), kept)
        assert session.generate(max_tokens=1, **NO_END).finish_reason == "length"
