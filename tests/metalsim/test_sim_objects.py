"""Objects are compiled again when, and only when, something they were made from changed."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from metalsim.objects import compile_object, compile_objects, locked, write_changed

COMPILER = """
import sys
from pathlib import Path
option = lambda name: Path(sys.argv[sys.argv.index(name) + 1])
source, header = option("-c"), option("-c").with_suffix(".h")
option("-o").write_text(source.read_text() + header.read_text())
option("-MF").write_text(f"{option('-o')}: {source} \\\\\\n {header}\\n")
with Path(__file__).with_name("runs").open("a") as runs:
    runs.write("x")
if source.read_text() == "early":
    source.write_text("late")  # somebody saves the file while it is compiled
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "cc.py").write_text(COMPILER)
    (tmp_path / "a.h").write_text("|header")
    (tmp_path / "a.cpp").write_text("source")
    return tmp_path / "a.cpp"


def compiled(source: Path, *flags: str) -> str:
    command = [sys.executable, str(source.parent / "compiler" / "cc.py")]
    return compile_object(command, flags, source, source.parent / "objects").read_text()


def runs(source: Path) -> int:
    return len((source.parent / "compiler" / "runs").read_text())


def test_unchanged_source_is_compiled_once(source: Path) -> None:
    assert compiled(source) == compiled(source) == "source|header"
    assert runs(source) == 1


def test_changes_of_source_header_and_flags_count(source: Path) -> None:
    compiled(source)
    source.write_text("other")
    assert compiled(source) == "other|header"
    source.with_suffix(".h").write_text("|changed")
    assert compiled(source) == "other|changed"
    compiled(source, "-O2")
    assert runs(source) == 4


def test_source_that_changes_while_it_is_compiled_is_compiled_again(source: Path) -> None:
    source.write_text("early")
    assert compiled(source) == "early|header"
    assert compiled(source) == "late|header"


SLOW = """
import sys, time
from pathlib import Path
option = lambda name: Path(sys.argv[sys.argv.index(name) + 1])
with Path(__file__).with_name("runs").open("a") as runs:
    runs.write(option("-c").stem)
time.sleep(0.2)
option("-o").write_text("object of " + option("-c").stem)
option("-MF").write_text(f"{option('-o')}: {option('-c')}\\n")
"""


def build_all(folder: Path) -> list[str]:
    command = [sys.executable, str(folder / "cc" / "cc.py")]
    return [
        each.read_text()
        for each in compile_objects(command, [], sorted(folder.glob("*.cpp")), folder / "out")
    ]


def test_two_processes_share_the_work_and_do_none_of_it_twice(tmp_path: Path) -> None:
    (tmp_path / "cc").mkdir()
    (tmp_path / "cc" / "cc.py").write_text(SLOW)
    for name in "abcdef":
        (tmp_path / f"{name}.cpp").write_text("source")
    with ProcessPoolExecutor(2) as pool:
        objects = [job.result() for job in [pool.submit(build_all, tmp_path) for _ in range(2)]]
    assert objects == [[f"object of {name}" for name in "abcdef"]] * 2
    assert sorted((tmp_path / "cc" / "runs").read_text()) == list("abcdef")


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path) as first, locked(path, wait=False) as second:
        assert (first, second) == (True, False)
    with locked(path, wait=False) as third:
        assert third


def test_files_are_written_only_if_they_change(tmp_path: Path) -> None:
    path = tmp_path / "generated" / "a.cpp"
    write_changed(path, "one")
    before = path.stat().st_mtime_ns
    time.sleep(0.01)
    write_changed(path, "one")
    assert path.stat().st_mtime_ns == before
    write_changed(path, "two")
    assert path.read_text() == "two"
    assert [each.name for each in path.parent.iterdir()] == ["a.cpp"]
