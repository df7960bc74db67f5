"""Objects are compiled again when, and only when, something they were made from changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from metalsim.objects import compile_object

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
