"""Stored states on disk: found again bit for bit, or dropped with a message, or absent; whatever happens."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engine_support import altered, flip, ids_of, load

import lily_py
from lily_py.disk_store import DiskStore

WRITE_UNTIL_KILLED = """
import sys, random
import lily_py

folder, cache, saved, seed = sys.argv[1:]
draw = random.Random(int(seed))
base = [draw.randrange(256) for _ in range(1200)]
with lily_py.Engine.load(folder, threads=1, cache_dir=cache, snapshot_interval=200) as engine:
    session = engine.new_session()
    print("ready", flush=True)
    while True:
        prompt = base[: draw.randrange(1, 1200)] + [draw.randrange(256) for _ in range(5)]
        engine.generate(prompt, max_tokens=3, temperature=0)
        session.append([draw.randrange(256) for _ in range(40)])
        session.save(saved)
        if len(session) > 1000:
            session.rewind(0)
"""


def test_stored_states_outlive_the_engine(folder: Path, tmp_path: Path) -> None:
    prompt = ids_of(1100)
    with load(folder, cache_dir=tmp_path) as engine:
        first = engine.generate(prompt, max_tokens=10, seed=1)
    with load(folder, cache_dir=tmp_path) as engine:
        again = engine.generate(prompt, max_tokens=10, seed=1)
        longer = engine.generate([*prompt, *first.token_ids, 4], max_tokens=10, seed=1)
    with load(folder, cache_bytes=0) as engine:
        cold = engine.generate([*prompt, *first.token_ids, 4], max_tokens=10, seed=1)
    assert again.usage.cached_tokens == 1099
    assert again.token_ids == first.token_ids
    assert longer.usage.cached_tokens >= 1100
    assert longer.token_ids == cold.token_ids


def test_prefixes_of_one_conversation_share_their_pages(folder: Path, tmp_path: Path) -> None:
    with load(folder, cache_dir=tmp_path, snapshot_interval=0) as engine:
        engine.generate(ids_of(1100), max_tokens=1, temperature=0)
        engine.generate([*ids_of(1100), 5], max_tokens=1, temperature=0)
    assert len(list(tmp_path.glob("*/pages-*"))) == 2
    assert len(list(tmp_path.glob("*/prefix-*"))) >= 3


def test_the_store_is_private(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        with load(folder, cache_dir=cache) as engine:
            engine.generate(ids_of(600), max_tokens=1)
    finally:
        os.umask(before)
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.glob("*/")} == {0o700}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_least_recently_used_leave_the_disk_first(folder: Path, tmp_path: Path) -> None:
    def cached(engine: lily_py.Engine, seed: int) -> int:
        return engine.generate([*ids_of(100, seed=seed), 1], max_tokens=1, temperature=0).usage.cached_tokens

    with load(folder, cache_dir=tmp_path) as engine:
        for seed in range(4):
            cached(engine, seed)
    total = sum(path.stat().st_size for path in tmp_path.glob("*/*.lily"))
    with load(folder, cache_dir=tmp_path) as engine:
        assert cached(engine, 0) == 100
    with load(folder, cache_dir=tmp_path, cache_dir_bytes=total // 2) as engine:
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.lily")) <= total // 2
        engine._runtime.store._disk = None  # what is asked for from here on isn't written
        disk = DiskStore(tmp_path, total, engine._runtime.model, engine._runtime.identity)
        assert any(np.array_equal(tokens[:100], ids_of(100, seed=0)) for tokens in disk.tokens())
        assert not any(np.array_equal(tokens[:100], ids_of(100, seed=1)) for tokens in disk.tokens())


@pytest.mark.parametrize("kind", ["prefix", "pages"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_file_is_dropped_with_a_message(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, harm: str
) -> None:
    prompt = ids_of(700)
    with load(folder, cache_dir=tmp_path) as engine:
        first = engine.generate(prompt, max_tokens=5, seed=1)
    for path in tmp_path.glob(f"*/{kind}-*"):
        if harm == "flip":
            flip(path, path.stat().st_size - 3)
        elif harm == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
    with caplog.at_level(logging.WARNING, "lily"), load(folder, cache_dir=tmp_path) as engine:
        again = engine.generate(prompt, max_tokens=5, seed=1)
    assert again.usage.cached_tokens == 0
    assert again.token_ids == first.token_ids
    assert ("dropped" in caplog.text) == ((kind, harm) != ("prefix", "remove"))
    with load(folder, cache_dir=tmp_path) as engine:
        assert engine.generate(prompt, max_tokens=5, seed=1).usage.cached_tokens == 699


def test_what_another_process_removed_is_missed_without_a_message(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(folder, cache_dir=tmp_path) as engine:
        engine.generate(ids_of(100), max_tokens=1)
    with caplog.at_level(logging.WARNING, "lily"), load(folder, cache_dir=tmp_path) as engine:
        for path in tmp_path.glob("*/prefix-*"):
            path.unlink()
        assert engine.generate(ids_of(100), max_tokens=1).usage.cached_tokens == 0
        engine._runtime.store._disk.flush()  # type: ignore[union-attr]
        assert "dropped" not in caplog.text
    with load(folder, cache_dir=tmp_path) as engine:
        assert engine.generate(ids_of(100), max_tokens=1).usage.cached_tokens == 99


def test_another_models_states_are_never_taken(folder: Path, tmp_path: Path) -> None:
    other = altered(folder, tmp_path / "copy")
    cache = tmp_path / "cache"
    with load(folder, cache_dir=cache) as engine:
        engine.generate(ids_of(50), max_tokens=1)
    for options in ({}, {"kv_dtype": "float32"}):
        with load(other if not options else folder, cache_dir=cache, **options) as engine:
            assert engine.generate(ids_of(50), max_tokens=1).usage.cached_tokens == 0


def test_two_engines_share_a_folder(folder: Path, tmp_path: Path) -> None:
    with load(folder, cache_dir=tmp_path) as one:
        one.generate(ids_of(50), max_tokens=1)
        one._runtime.store._disk.flush()  # type: ignore[union-attr]
        with load(folder, cache_dir=tmp_path) as two:
            assert two.generate(ids_of(50), max_tokens=1).usage.cached_tokens == 49


def test_a_folder_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(lily_py.InvalidArgumentError, match=r"cache_dir .*file.* can't be used"):
        load(folder, cache_dir=tmp_path / "file")
    with pytest.raises(lily_py.InvalidArgumentError, match="cache_dir needs cache_bytes above 0"):
        load(folder, cache_dir=tmp_path, cache_bytes=0)
    with pytest.raises(lily_py.InvalidArgumentError, match="cache_dir_bytes must be"):
        load(folder, cache_dir=tmp_path, cache_dir_bytes="much")


def test_a_disk_that_fills_up_ends_the_writing_only(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING, "lily"), load(folder, cache_dir=tmp_path) as engine:
        monkeypatch.setattr(os, "fsync", full)
        first = engine.generate(ids_of(50), max_tokens=4, seed=1)
        engine._runtime.store._disk.flush()  # type: ignore[union-attr]
        again = engine.generate(ids_of(50), max_tokens=4, seed=1)
    assert first.token_ids == again.token_ids
    assert again.usage.cached_tokens == 49
    assert "nothing more is written" in caplog.text
    assert not list(tmp_path.glob("*/*.lily"))


@pytest.mark.slow
def test_killed_at_any_moment_every_state_is_whole_or_absent(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, saved = tmp_path / "cache", tmp_path / "session"
    draw = random.Random(0)
    seen = 0
    with load(folder, cache_bytes=0) as cold:
        for round in range(20):
            command = [sys.executable, "-c", WRITE_UNTIL_KILLED, folder, cache, saved, str(round % 3)]
            with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(draw.uniform(0, 0.3))
                process.send_signal(signal.SIGKILL)
            with caplog.at_level(logging.WARNING, "lily"), load(folder, cache_dir=cache) as engine:
                disk = engine._runtime.store._disk
                assert disk is not None
                stored = disk.tokens()
                seen += len(stored)
                for tokens in stored[-6:]:
                    prompt = [*tokens.tolist(), draw.randrange(256)]
                    warm = engine.generate(prompt, max_tokens=4, temperature=0)
                    assert warm.usage.cached_tokens >= len(tokens)
                    assert warm.token_ids == cold.generate(prompt, max_tokens=4, temperature=0).token_ids
                if saved.exists():
                    with engine.load_session(saved) as session:
                        np.testing.assert_array_equal(session.logits(), cold.prefill(session.tokens))
    assert seen > 20
    assert saved.exists()
    assert "dropped" not in caplog.text
    assert not list(cache.glob("*/.*"))
