"""Random mixed use of lily, for as long as you like: what was reused must equal a computation from nothing.

    python tools/soak.py --minutes 60 --report docs/soak.md

Threads share one engine on the demo model. Each does one random thing after another: sessions that grow, go
back, branch, are saved and loaded; requests of every kind, streamed, cancelled, abandoned, asynchronous,
with several answers, held to a form; impossible requests; evictions. At random, results are compared bit for
bit with a second engine that stores nothing. The engine is closed and opened again every minute on the same
`cache_dir`, and memory, open files and threads are noted while it is closed.

Ends with status 1 if anything differed, failed unexpectedly, or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import lily

MIB = 1 << 20
LIMIT = 700
"""Tokens of a conversation, to keep computations from nothing short."""
WARM_UP = 5
"""Rounds before memory is compared: caches of the process and the allocator fill up first."""
GROWTH = 16 * MIB
"""What is live may rise by this between then and the end."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Who are you?",
    "What is 12 plus 7?",
    "What is 27 + 48?",
    "Count from 1 to 5",
    "Write naïve, 漢字 and 🙂.",
    "a" * 70,
)
SYSTEM = {"role": "system", "content": "You are a lily. Answer briefly."}


@dataclass
class Sample:
    """The process at one moment, in seconds since the start; bytes, files and threads of its own.

    `live` is what stays resident when the C library has given back the freed memory that it keeps: with
    threads that come and go it keeps some in each of its arenas.
    """

    seconds: float
    resident: int
    live: int
    files: int
    threads: int


@dataclass
class Tally:
    """What happened, counted by all threads."""

    done: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    cached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, counter: Counter[str], name: str) -> None:
        with self.lock:
            counter[name] += 1

    def result(self, result: lily.Result) -> None:
        with self.lock:
            self.requests += 1
            self.tokens += result.usage.completion_tokens + result.usage.prompt_tokens
            self.cached += result.usage.cached_tokens

    def fault(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)
        print(f"WRONG: {text}", file=sys.stderr, flush=True)


class Mismatch(AssertionError):
    """A reused state gave something else than a computation from nothing."""


class Worker:
    """One thread's random use of a shared engine."""

    def __init__(self, engine: lily.Engine, cold: lily.Engine, tally: Tally, folder: Path, seed: str) -> None:
        self.engine, self.cold, self.tally, self.seed = engine, cold, tally, seed
        self.random = random.Random(seed)
        self.path = folder / f"{seed}.session"
        self.plain: list[tuple[lily.Session, list[int]]] = []
        self.talks: list[lily.Session] = []
        self.history: list[dict[str, Any]] = [SYSTEM, user(QUESTIONS[0])]

    def run(self, deadline: float) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (8, self.session_grows),
            (5, self.session_answers),
            (4, self.session_goes_back),
            (2, self.session_branches),
            (2, self.session_is_saved),
            (4, self.session_talks),
            (8, self.request),
            (4, self.conversation),
            (2, self.asynchronous),
            (2, self.impossible),
            (1, self.evict),
        ]
        weights = [weight for weight, _ in actions]
        while time.monotonic() < deadline:
            action = self.random.choices(actions, weights)[0][1]
            name = action.__name__.replace("_", " ")
            try:
                action()
                self.tally.count(self.tally.done, name)
            except Exception as error:
                self.tally.fault(f"{self.seed}: {name}: {type(error).__name__}: {error}")
        for session, _ in self.plain:
            session.close()
        for session in self.talks[::2]:  # the others are left to the engine's close
            session.close()

    # ---- sessions of tokens

    def pick(self) -> tuple[lily.Session, list[int]]:
        if not self.plain or (len(self.plain) < 4 and self.random.random() < 0.2):
            self.plain.append((self.engine.new_session(), []))
        return self.random.choice(self.plain)

    def session_grows(self) -> None:
        session, tokens = self.pick()
        added = self.ids(self.random.choice([1, 5, 63, 64, 65, 150]))
        if len(tokens) + len(added) > LIMIT:
            session.rewind(0)
            tokens.clear()
        session.append(added)
        tokens += added
        self.check_session(session, tokens)

    def session_answers(self) -> None:
        session, tokens = self.pick()
        if not tokens or len(tokens) > LIMIT:
            return
        stream = session.stream(max_tokens=self.random.randint(1, 30), seed=self.random.getrandbits(32))
        if self.random.random() < 0.3:
            for _ in itertools.islice(stream, self.random.randint(0, 5)):
                pass
            stream.close()
        result = stream.finish() if not stream.ended else stream.result
        self.tally.result(result)
        tokens += result.token_ids
        self.check_session(session, tokens)

    def session_goes_back(self) -> None:
        session, tokens = self.pick()
        to = self.random.randint(0, len(tokens))
        rest = tokens[to + 1 :]
        session.rewind(to)
        del tokens[to:]
        if rest and self.random.random() < 0.5:  # an edit in the middle
            session.append([7, *rest])
            tokens += [7, *rest]
        self.check_session(session, tokens)

    def session_branches(self) -> None:
        session, tokens = self.pick()
        if len(self.plain) > 5:
            self.plain.pop(self.random.randrange(len(self.plain)))[0].close()
            return
        self.plain.append((session.fork(), list(tokens)))
        self.check_session(*self.plain[-1])

    def session_is_saved(self) -> None:
        session, tokens = self.pick()
        session.save(self.path)
        if self.random.random() < 0.5 and len(self.plain) < 6:
            self.plain.append((self.engine.load_session(self.path), list(tokens)))
            self.check_session(*self.plain[-1])
        else:
            session.load(self.path)
            self.check_session(session, tokens)
        self.path.unlink()

    def check_session(self, session: lily.Session, tokens: list[int]) -> None:
        if session.tokens != tokens:
            raise Mismatch(f"the session holds {len(session.tokens)} tokens, expected {len(tokens)}")
        if tokens and self.random.random() < 0.3:
            if not np.array_equal(session.logits(), self.cold.prefill(tokens)):
                raise Mismatch(f"logits after {len(tokens)} tokens")
            self.tally.count(self.tally.checks, "logits of a session")

    # ---- conversations

    def session_talks(self) -> None:
        if not self.talks or (len(self.talks) < 3 and self.random.random() < 0.3):
            self.talks.append(self.engine.new_session(thinking=self.random.choice([None, True, False])))
        session = self.random.choice(self.talks)
        if len(session) > LIMIT:
            session.rewind(messages=0)
        elif len(session.messages) > 2 and self.random.random() < 0.3:
            session.rewind(messages=2)
        result = session.generate(
            self.random.choice(QUESTIONS), max_tokens=40, seed=self.random.getrandbits(9)
        )
        self.tally.result(result)
        if self.random.random() < 0.3:
            if not np.array_equal(session.logits(), self.cold.prefill(session.tokens)):
                raise Mismatch(f"logits of a conversation of {len(session.messages)} messages")
            self.tally.count(self.tally.checks, "logits of a conversation")

    def conversation(self) -> None:
        """The whole history each time, as a chat program sends it: extended, answered anew, edited, cut."""
        history, what = self.history, self.random.random()
        if what < 0.2 and len(history) > 4:
            history[self.random.randrange(1, len(history) - 1)] |= {"content": self.random.choice(QUESTIONS)}
        elif what < 0.3 and len(history) > 4:
            del history[1:3]
        elif what < 0.6:
            del history[-1 if history[-1]["role"] == "assistant" else len(history) :]
        if history[-1]["role"] != "user":
            history.append(user(self.random.choice(QUESTIONS)))
        keywords = {"max_tokens": 40, "seed": self.random.getrandbits(16)}
        result = self.engine.chat(history, **keywords)
        self.tally.result(result)
        self.compare(result, history, keywords, "a conversation")
        history.append(result.message)
        if result.usage.prompt_tokens > LIMIT:
            self.history = [SYSTEM, user(QUESTIONS[1])]

    # ---- requests

    def request(self) -> None:
        prompt, keywords = self.prompt(), self.keywords()
        ways = [self.whole, self.streamed, self.cancelled, self.abandoned, self.several]
        self.random.choice(ways)(prompt, keywords)

    def whole(self, prompt: Any, keywords: dict[str, Any]) -> None:
        result = self.engine.generate(prompt, **keywords)
        self.tally.result(result)
        self.compare(result, prompt, keywords, "a request")

    def streamed(self, prompt: Any, keywords: dict[str, Any]) -> None:
        chunks = []
        with self.engine.stream(prompt, **keywords) as stream:
            chunks += list(stream)
        self.tally.result(stream.result)
        if "".join(chunk.text for chunk in chunks) != stream.result.text:
            raise Mismatch("the chunks' text isn't the result's")
        self.compare(stream.result, prompt, keywords, "a stream")

    def cancelled(self, prompt: Any, keywords: dict[str, Any]) -> None:
        stream = self.engine.stream(prompt, **keywords)
        timer = threading.Timer(self.random.uniform(0, 0.03), stream.cancel)
        timer.start()
        result = stream.finish()
        timer.join()
        self.tally.result(result)
        expected = self.cold.generate(prompt, **keywords).token_ids[: len(result.token_ids)]
        if result.token_ids != expected:
            raise Mismatch("a cancelled request says something else than it would have")
        self.tally.count(self.tally.checks, "a cancelled request")

    def abandoned(self, prompt: Any, keywords: dict[str, Any]) -> None:
        stream = self.engine.stream(prompt, **keywords)
        for _ in itertools.islice(stream, self.random.randint(0, 5)):
            pass

    def several(self, prompt: Any, keywords: dict[str, Any]) -> None:
        result = self.engine.generate(prompt, n=3, **keywords)
        for i, choice in enumerate(result.choices):
            self.tally.result(choice)
            self.compare(choice, prompt, {**keywords, "seed": keywords["seed"] + i}, "one of several answers")

    def asynchronous(self) -> None:
        asked = [(self.prompt(), self.keywords()) for _ in range(3)]

        async def read(prompt: Any, keywords: dict[str, Any]) -> lily.Result:
            async with self.engine.astream(prompt, **keywords) as stream:
                async for _ in stream:
                    pass
            return stream.result

        async def run() -> list[lily.Result]:
            dropped = asyncio.create_task(
                self.engine.agenerate(self.prompt(), max_tokens=300, min_tokens=300)
            )
            results = await asyncio.gather(*[read(prompt, keywords) for prompt, keywords in asked])
            dropped.cancel()
            await asyncio.gather(dropped, return_exceptions=True)
            return results

        for result, (prompt, keywords) in zip(asyncio.run(run()), asked, strict=True):
            self.tally.result(result)
            self.compare(result, prompt, keywords, "an asynchronous request")

    def impossible(self) -> None:
        def broken(tokens: list[int], logits: Any) -> Any:
            raise ZeroDivisionError("a processor's own")

        attempts: list[tuple[Any, dict[str, Any], type[Exception]]] = [
            ([1, 2], {"temp": 1}, lily.UnknownKeywordError),
            ([1, 2], {"top_p": 2}, lily.InvalidArgumentError),
            ([1, 1 << 20], {}, lily.InvalidArgumentError),
            ([1] * 100, {"max_tokens": 10**6}, lily.ContextLengthError),
            ([], {}, lily.InvalidArgumentError),
            ([{"role": "nobody", "content": ""}], {}, lily.TemplateError),
            ([1, 2], {"regex": "("}, lily.InvalidArgumentError),
            ([1, 2], {"logits_processors": [broken]}, ZeroDivisionError),
        ]
        prompt, keywords, expected = self.random.choice(attempts)
        try:
            self.engine.generate(prompt, **keywords)
        except expected as error:
            self.tally.count(self.tally.refused, type(error).__name__)
            return
        raise Mismatch(f"{prompt!r:.40} with {keywords} was accepted")

    def evict(self) -> None:
        store = self.engine._runtime.store
        store.trim(self.random.randint(0, store.nbytes))

    def compare(self, result: lily.Result, prompt: Any, keywords: dict[str, Any], what: str) -> None:
        if self.random.random() > 0.5:
            return
        expected = self.cold.generate(prompt, **keywords)
        for name in ("token_ids", "text", "reasoning", "finish_reason", "logprobs", "stop"):
            if getattr(result, name) != getattr(expected, name):
                raise Mismatch(
                    f"{what}: {name} is {getattr(result, name)!r}, cold {getattr(expected, name)!r}"
                )
        self.tally.count(self.tally.checks, what)

    def ids(self, count: int) -> list[int]:
        # Few different beginnings, so that much is found again.
        draw = random.Random(self.random.randrange(6))
        return [draw.randrange(256) for _ in range(count)]

    def prompt(self) -> Any:
        if self.random.random() < 0.5:
            return self.random.choice(QUESTIONS)
        return [*self.ids(self.random.choice([1, 40, 64, 200, 500])), self.random.randrange(256)]

    def keywords(self) -> dict[str, Any]:
        draw = self.random
        keywords: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": draw.getrandbits(32)}
        choices: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1.3, "top_k": 0, "top_p": draw.choice([0.5, 0.95])},
            {"min_p": 0.05},
            {"xtc_probability": 0.5},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"logit_bias": {5: 3.0, 6: float("-inf")}},
            {"stop": ["1", "e"]},
            {"top_logprobs": 3},
            {"min_tokens": 5, "max_tokens": 40},
            {"regex": "(yes|no)[0-9]{3}"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"logits_processors": [lambda tokens, logits: logits * np.float32(0.7)]},
        ]
        for extra in draw.sample(choices, draw.randint(0, 3)):
            if not (
                {"regex", "response_format"} & keywords.keys() and {"regex", "response_format"} & extra.keys()
            ):
                keywords |= extra
        return keywords


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sample(start: float) -> Sample:
    """Look at this process (Linux)."""
    end = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < end:  # threads of the closed engine are ending
        time.sleep(0.05)
    resident = resident_bytes()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return Sample(time.monotonic() - start, resident, resident_bytes(), files, threads)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(options: argparse.Namespace, folder: Path, tally: Tally, samples: list[Sample]) -> None:
    """Run rounds until the time is over; note the process after each."""
    model = folder / "model"
    shutil.copytree(Path(lily.__file__).parents[1] / "lily_py" / "demo", model)
    (folder / "saved").mkdir()
    start = time.monotonic()
    end = start + 60 * options.minutes
    with lily.Engine.load(model, threads=1, cache_bytes=0) as cold:
        for number in itertools.count():
            left = end - time.monotonic()
            if left <= 0:
                return
            deadline = time.monotonic() + min(left, options.round)
            engine = lily.Engine.load(
                model,
                threads=options.threads,
                cache_bytes="6MB",
                snapshot_interval=64,
                cache_dir=folder / "cache",
                cache_dir_bytes="40MB",
            )
            with engine:
                names = [f"{options.seed}-{number}-{i}" for i in range(options.workers)]
                workers = [Worker(engine, cold, tally, folder / "saved", name) for name in names]
                threads = [threading.Thread(target=worker.run, args=(deadline,)) for worker in workers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            del engine, workers, threads
            gc.collect()
            samples.append(sample(start))
            now = samples[-1]
            print(
                f"{now.seconds:7.0f} s: {now.resident / MIB:.1f}, {now.live / MIB:.1f} MiB, "
                f"{now.files} files, {now.threads} threads; "
                f"{sum(tally.done.values())} actions, {tally.requests} requests, {tally.tokens} tokens, "
                f"{sum(tally.checks.values())} comparisons, {len(tally.wrong)} wrong",
                flush=True,
            )


def growth(samples: list[Sample]) -> list[str]:
    """Say what grew after the first rounds."""
    settled = samples[min(WARM_UP, len(samples) - 1)]
    last, found = samples[-1], []
    if last.live - settled.live > GROWTH:
        found.append(f"memory grew by {(last.live - settled.live) / MIB:.1f} MiB")
    if last.files > settled.files:
        found.append(f"open files grew from {settled.files} to {last.files}")
    if last.threads > settled.threads:
        found.append(f"threads grew from {settled.threads} to {last.threads}")
    return found


def page(options: argparse.Namespace, tally: Tally, samples: list[Sample], grown: list[str]) -> str:
    """The result as a page."""

    def listed(counter: Counter[str]) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in sorted(counter.items(), key=lambda e: -e[1]))

    step = max(1, len(samples) // 12)
    shown = [*samples[:-1:step], samples[-1]]
    rows = [
        f"{each.seconds / 60:.0f} | {each.resident / MIB:.1f} | {each.live / MIB:.1f} | {each.files} | "
        f"{each.threads}"
        for each in shown
    ]
    verdict = (
        "Nothing differed, nothing failed, nothing grew." if not (tally.wrong or grown) else "**Failed.**"
    )
    return "\n".join(
        [
            "# Soak",
            "",
            f"{samples[-1].seconds / 60:.0f} minutes of random mixed use of the demo model on "
            f"{time.strftime('%Y-%m-%d')} ({platform.system()}, Python {platform.python_version()}, "
            f"lily-py {lily.__version__}): "
            f"{options.workers} threads share one engine, which is closed and opened again every "
            f"{options.round:.0f} s on the same `cache_dir`. {verdict}",
            "",
            f"- {sum(tally.done.values()):,} actions: {listed(tally.done)}.",
            f"- {tally.requests:,} answers, {tally.tokens:,} tokens of prompts and answers, "
            f"{tally.cached:,} of them taken from stored states.",
            f"- {sum(tally.checks.values()):,} comparisons with an engine that stores nothing, bit for bit: "
            f"{listed(tally.checks)}.",
            f"- Impossible requests, refused as they should: {listed(tally.refused)}.",
            *[f"- Wrong: {text}" for text in [*tally.wrong[:20], *grown]],
            "",
            "The process between two rounds, no engine but the one for comparison open:",
            "",
            "minute | resident, MiB | after `malloc_trim` | open files | threads",
            "------ | ------------- | ------------------- | ---------- | -------",
            *rows,
            "",
            "```",
            f"python tools/soak.py --minutes {options.minutes:g} --workers {options.workers} "
            f"--threads {options.threads} --seed {options.seed}",
            "```",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Use lily at random and compare with computations from nothing."
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=3, help="threads that use the engine (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the engine (default: 1)")
    parser.add_argument("--round", type=float, default=60, help="seconds between closing and opening again")
    parser.add_argument("--seed", default="0", help="of the random choices; timing adds its own")
    parser.add_argument("--report", type=Path, help="write the result as a page")
    options = parser.parse_args()
    tally, samples = Tally(), []
    with tempfile.TemporaryDirectory(prefix="lily-soak-") as folder:
        soak(options, Path(folder), tally, samples)
    grown = growth(samples)
    text = page(options, tally, samples, grown)
    print(text)
    if options.report:
        options.report.write_text(text)
    return 1 if tally.wrong or grown else 0


if __name__ == "__main__":
    sys.exit(main())
