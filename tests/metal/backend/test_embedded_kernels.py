"""The kernel texts in the extension: complete without a file system, with the lines of their files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from metal_reference import METAL, ROOT

sys.path.insert(0, str(ROOT / "csrc" / "backend" / "metal"))

import embed_kernels

from metalsim.msl import static_check  # isort: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.h").write_text("#pragma once\nint a;\n")
    (tmp_path / "common" / "b.h").write_text('#pragma once\n#include "common/a.h"\nint b;\n')
    (tmp_path / "k.metal").write_text(
        '#include <metal_stdlib>\n#include "common/b.h"\n#include "common/a.h"\nint k;\n'
    )
    return tmp_path


def test_includes_are_put_in_their_place_once(folder: Path) -> None:
    text = embed_kernels.flatten(folder / "k.metal", folder)
    code = [line for line in text.splitlines() if line and not line.startswith("#line")]
    assert code == ["#include <metal_stdlib>", "int a;", "int b;", "int k;"]


def test_lines_are_those_of_the_files(folder: Path) -> None:
    place, places = ("", 0), {}
    for line in embed_kernels.flatten(folder / "k.metal", folder).splitlines():
        if line.startswith("#line"):
            _, number, name = line.split()
            place = (name.strip('"'), int(number))
        else:
            places[line] = place
            place = (place[0], place[1] + 1)
    assert places["int a;"] == ("common/a.h", 2)
    assert places["int b;"] == ("common/b.h", 3)
    assert places["int k;"] == ("k.metal", 4)


def test_language_follows_from_what_is_included(folder: Path) -> None:
    (folder / "t.metal").write_text("#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n")
    text = embed_kernels.embed(folder)
    assert '{"k", ' in text
    assert text.count("Language::metal_3_1") == 1
    assert text.count("Language::metal_4_0") == 1


def test_output_is_touched_only_if_it_changes(folder: Path) -> None:
    output = folder / "embedded.cpp"
    command = [sys.executable, embed_kernels.__file__, str(folder), str(output)]
    subprocess.run(command, check=True)
    before = output.stat().st_mtime_ns
    subprocess.run(command, check=True)
    assert output.stat().st_mtime_ns == before
    (folder / "common" / "a.h").write_text("int other;\n")
    subprocess.run(command, check=True)
    assert "int other;" in output.read_text()


@pytest.mark.parametrize("name", ["project", "attention"])
def test_embedded_text_passes_the_static_check_alone(compiler: Path, tmp_path: Path, name: str) -> None:
    alone = tmp_path / f"{name}.metal"
    alone.write_text(embed_kernels.flatten(METAL / f"{name}.metal", METAL))
    assert static_check.check(alone) == []
    alone.write_text(alone.read_text() + "\nkernel void broken(device float* a [[buffer(0)]]) { nope(); }\n")
    assert any(f"{name}.metal:" in message for message in static_check.check(alone))
