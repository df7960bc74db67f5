"""Sessions on disk: they go on bit for bit, or are refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import Tiny, altered, flip, ids_of, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily_py
from lily_py import _core
from lily_py.state_file import read_state_file, write_state_file

NEW_PROCESS = """
import json, sys
import lily_py

with lily_py.Engine.load(sys.argv[1], threads=1) as engine:
    for path in sys.argv[2:]:
        with engine.load_session(path) as session:
            before = list(session.tokens)
            logits = session.logits().tolist() if before else []
            result = session.generate([9, 8], max_tokens=20, seed=5, temperature=1.0)
            print(json.dumps([before, logits, list(result.token_ids)]))
"""


def continuation(session: lily_py.Session) -> tuple[int, ...]:
    return session.generate([9, 8], max_tokens=20, seed=5, temperature=1.0).token_ids


# ---- sessions


def test_b24_a_saved_session_goes_on_in_a_new_process(
    engine: lily_py.Engine, folder: Path, tmp_path: Path
) -> None:
    paths, expected = [], []
    for name, length, answer in [
        ("none", 0, 0),
        ("one", 1, 0),
        ("many", 200, 0),
        ("page", 64, 0),
        ("said", 70, 9),
    ]:
        session = engine.new_session()
        if length:
            session.append(ids_of(length))
        if answer:
            session.generate(max_tokens=answer, temperature=0)
        paths.append(str(tmp_path / name))
        session.save(paths[-1])
        logits = session.fork().logits().tolist() if length else []
        expected.append([session.tokens, logits, list(continuation(session))])
    command = [sys.executable, "-c", NEW_PROCESS, str(folder), *paths]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert [json.loads(line) for line in output.splitlines()] == expected


def test_what_is_loaded_needs_no_computation(engine: lily_py.Engine, tmp_path: Path) -> None:
    with engine.new_session() as session:
        session.append(ids_of(150))
        session.save(tmp_path / "s")
    engine._runtime.store.clear()
    with engine.load_session(tmp_path / "s") as session:
        result = session.generate(max_tokens=1, temperature=0)
        assert result.usage.cached_tokens == 150


def test_messages_and_the_templates_arguments_come_back(tiny: Tiny, tmp_path: Path) -> None:
    with load(tiny("dense", "mlx-4bit-g64")) as engine:
        with engine.new_session(thinking=False) as session:
            session.generate("hello", max_tokens=5, temperature=0)
            session.save(tmp_path / "s")
            expected = session.generate("and?", max_tokens=8, seed=3)
            messages = session.messages
        with engine.load_session(tmp_path / "s") as session:
            assert session.messages == messages[:2]
            assert session.generate("and?", max_tokens=8, seed=3).token_ids == expected.token_ids
            assert session.messages == messages


def test_a_session_can_be_saved_without_a_store_of_states(folder: Path, tmp_path: Path) -> None:
    with load(folder, cache_bytes=0) as engine:
        session = engine.new_session()
        session.append(ids_of(100))
        session.generate(max_tokens=3, temperature=0)
        session.save(tmp_path / "s")
        assert continuation(engine.load_session(tmp_path / "s")) == continuation(session)


def test_saving_does_not_change_the_session(engine: lily_py.Engine, tmp_path: Path) -> None:
    with engine.new_session() as session, engine.new_session() as other:
        for each in (session, other):
            each.append(ids_of(90))
            each.generate(max_tokens=2, temperature=0)
        session.save(tmp_path / "s")
        assert session._state is not None
        assert other._state is not None
        assert session._state.covered == other._state.covered
        assert session._state._sequence.snapshots() == other._state._sequence.snapshots()
        assert continuation(session) == continuation(other)


def test_loading_replaces_what_a_session_held(engine: lily_py.Engine, tmp_path: Path) -> None:
    with engine.new_session() as session:
        session.append(ids_of(30))
        session.save(tmp_path / "s")
        session.append(ids_of(40, seed=1))
        session.load(tmp_path / "s")
        assert session.tokens == ids_of(30)
        session.append([5])
        np.testing.assert_array_equal(session.logits(), engine.prefill([*ids_of(30), 5]))


def test_only_the_owner_can_read_a_saved_session(engine: lily_py.Engine, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with engine.new_session() as session:
            session.append([1, 2])
            session.save(tmp_path / "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("fine-tuned", "weights '"),
        ("quantised", "quantisation '.*affine 8-bit.*(saved).*affine 4-bit"),
        ("shape", "configuration '"),
        ("kv_dtype", "kv_dtype 'float32' .saved. and 'bfloat16' .loaded."),
        ("ablate", r"ablate \['integer_dot'\] .saved. and \[\] .loaded."),
    ],
)
def test_b24_another_model_or_setting_is_refused(
    engine: lily_py.Engine, folder: Path, tiny: Tiny, tmp_path: Path, other: str, named: str
) -> None:
    options: dict[str, Any] = {
        "kv_dtype": {"kv_dtype": "float32"},
        "ablate": {"ablate": ["integer_dot"]},
    }.get(other, {})
    where = {
        "fine-tuned": lambda: altered(folder, tmp_path / "copy"),
        "quantised": lambda: tiny("moe_tied", "mlx-8bit-g64"),
        "shape": lambda: tiny("dense", "mlx-4bit-g64"),
    }.get(other, lambda: folder)()
    with load(where, **options) as saving, saving.new_session() as session:
        session.append(ids_of(10))
        session.save(tmp_path / "s")
    with engine.new_session() as session:
        session.append([3])
        with pytest.raises(lily_py.SavedStateError, match=named):
            session.load(tmp_path / "s")
        assert session.tokens == [3]
    with pytest.raises(lily_py.SavedStateError, match="another model"):
        engine.load_session(tmp_path / "s")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_a_damaged_file_is_refused(engine: lily_py.Engine, tmp_path: Path, place: float, cut: bool) -> None:
    path = tmp_path / "s"
    with engine.new_session() as session:
        session.append(ids_of(70))
        session.save(path)
        size = path.stat().st_size
        if cut:
            os.truncate(path, int(place * size))
        else:
            flip(path, int(place * size))
        with pytest.raises(lily_py.SavedStateError, match=r"damaged|not a file of saved states"):
            session.load(path)
        assert session.tokens == ids_of(70)
        assert len(session.logits()) > 0


def test_longer_files_other_kinds_and_missing_ones_are_refused(
    engine: lily_py.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with engine.new_session() as session:
        session.append(ids_of(5))
        session.save(path)
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(lily_py.SavedStateError, match="damaged: has"):
            session.load(path)
        path.write_text("a story")
        with pytest.raises(lily_py.SavedStateError, match="not a file of saved states"):
            session.load(path)
        with pytest.raises(lily_py.InvalidArgumentError, match="no such file"):
            session.load(tmp_path / "nothing")
        with pytest.raises(lily_py.SavedStateError, match="can't be read"):
            session.load(tmp_path)
        with pytest.raises(lily_py.InvalidArgumentError, match="can't be saved there"):
            session.save(tmp_path / "no" / "such" / "folder")


def test_a_save_that_fails_leaves_the_older_file(
    engine: lily_py.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with engine.new_session() as session:
        session.append(ids_of(5))
        session.save(path)
        session.append(ids_of(5, seed=1))

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(lily_py.InvalidArgumentError, match="No space left"):
                session.save(path)
        assert os.listdir(tmp_path) == ["s"]
        session.load(path)
        assert session.tokens == ids_of(5)


def test_what_json_has_no_form_for_cannot_be_saved(engine: lily_py.Engine, tmp_path: Path) -> None:
    with engine.new_session(template_variables={"when": object()}) as session:
        session.append([1])
        with pytest.raises(lily_py.InvalidArgumentError, match="JSON has no form"):
            session.save(tmp_path / "s")


@pytest.mark.parametrize(
    "conversation",
    [
        "5",
        "{}",
        "[" * 50_000,
        '{"messages": [5], "template": {"tools": null, "thinking": null, "template_variables": null}}',
        '{"messages": [], "template": {"unknown": 1}}',
    ],
    ids=["number", "empty", "deep", "message", "template"],
)
def test_a_file_that_holds_something_else_is_refused(
    engine: lily_py.Engine, tmp_path: Path, conversation: str
) -> None:
    """Its checksums are right: another program wrote it, or another version."""
    path = tmp_path / "s"
    with engine.new_session() as session:
        session.append(ids_of(5))
        session.save(path)
        header, blocks = read_state_file(path, "session")
        blocks["conversation"] = np.frombuffer(conversation.encode(), np.uint8)
        write_state_file(path, "session", header.identity, header.meta, list(blocks.items()))
        with pytest.raises(lily_py.SavedStateError, match="damaged"):
            session.load(path)
        assert session.tokens == ids_of(5)


# ---- native pieces


def test_snapshots_come_back_and_pieces_of_wrong_size_are_refused(engine: lily_py.Engine) -> None:
    model = engine._runtime.model
    ids = np.array(ids_of(130), np.int32)
    sequence = model.new_sequence()
    for stop, begin in ((50, 0), (100, 50), (130, 100)):
        model.forward(sequence, ids[begin:stop])
        sequence.snapshot()
    prefix = sequence.prefix(130)
    pages, recurrent = prefix.pages(), prefix.recurrent()
    earlier = [(at, sequence.prefix(at).recurrent()) for at in (50, 100)]
    copy = _core.restore_sequence(_core.restore_prefix(model, ids, pages, recurrent), earlier)
    assert copy.snapshots() == [0, 50, 100, 130]
    for target in (130, 120, 60):
        np.testing.assert_array_equal(
            model.forward(copy.fork(), np.array([7], np.int32)),
            model.forward(sequence.fork(), np.array([7], np.int32)),
        )
        assert copy.truncate(target) == sequence.truncate(target)
    for wrong in (
        lambda: _core.restore_prefix(model, ids, pages[:-1], recurrent),
        lambda: _core.restore_prefix(model, ids, [*pages[:-1], pages[-1][:-1]], recurrent),
        lambda: _core.restore_prefix(model, ids, pages, recurrent[:-4]),
        lambda: _core.restore_prefix(model, ids[:0], [], recurrent),
        lambda: _core.restore_prefix(model, ids + 100_000, pages, recurrent),
        lambda: _core.restore_sequence(prefix, [(130, recurrent)]),
        lambda: _core.restore_sequence(prefix, [(0, recurrent)]),
        lambda: _core.restore_sequence(prefix, [(50, recurrent[:-4])]),
    ):
        with pytest.raises(lily_py.InvalidArgumentError):
            wrong()


def test_exported_bytes_stay_as_they_are_while_the_sequence_goes_on(engine: lily_py.Engine) -> None:
    model = engine._runtime.model
    sequence = model.new_sequence()
    model.forward(sequence, np.array(ids_of(70), np.int32))
    sequence.snapshot()
    views = [*sequence.prefix(70).pages(), sequence.prefix(70).recurrent()]
    copies = [view.copy() for view in views]
    model.forward(sequence, np.array(ids_of(100, seed=1), np.int32))
    sequence.drop_snapshot(70)
    for view, copy in zip(views, copies, strict=True):
        assert not view.flags.writeable
        np.testing.assert_array_equal(view, copy)
