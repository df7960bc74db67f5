"""The AArch64 kernels: built with a cross compiler, run on an emulated processor, compared bit for bit.

Debian's packages `g++-aarch64-linux-gnu` and `qemu-user` are all it takes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}")

missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing), reason=f"needs {' and '.join(missing)}: apt install g++-aarch64-linux-gnu qemu-user"
    ),
]


def build(source: Path, target: Path, *flags: str) -> Path:
    command = [COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def table(folder: Path, name: str, *flags: str) -> list[Path]:
    """Objects of every kernel, compiled as table `name`."""
    sources = sorted((ROOT / "csrc/backend/cpu/kernels").glob("*.cpp"))
    defines = (f"-DLILY_ISA={name}", f'-DLILY_ISA_NAME="{name}"', "-fno-math-errno", "-fno-trapping-math")
    return [build(source, folder / f"{name}_{source.stem}.o", *defines, *flags) for source in sources]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digests' program, with the plain kernels and those for dot products."""
    folder = tmp_path_factory.mktemp("aarch64")
    plain = [
        *(ROOT / "csrc/state").glob("*.cpp"),
        ROOT / "csrc/weights/matrix.cpp",
        ROOT / "csrc/backend/cpu/kernels.cpp",
        ROOT / "tests/native/kernel_digests.cpp",
    ]
    with ThreadPoolExecutor(2) as pool:
        tables = [
            pool.submit(table, folder, "generic"),
            pool.submit(table, folder, "neon", "-march=armv8.2-a+dotprod"),
        ]
        objects = [build(source, folder / f"{source.stem}.o", "-DLILY_NEON_KERNELS") for source in plain]
        for submitted in tables:
            objects += submitted.result()
    target = folder / "kernel_digests"
    link = [COMPILER, *map(str, objects), "-o", str(target)]
    subprocess.run(link, check=True, capture_output=True, text=True)
    return target


def emulate(program: Path, arguments: Sequence[str], processor: str) -> subprocess.CompletedProcess[str]:
    command = [EMULATOR, "-L", SYSROOT, "-cpu", processor, str(program), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


def test_dot_product_kernels_give_the_bits_of_the_plain_ones(program: Path) -> None:
    expected = emulate(program, ["generic"], "max")
    neon = emulate(program, ["neon"], "max")
    assert expected.returncode == neon.returncode == 0, expected.stderr + neon.stderr
    lines, others = expected.stdout.splitlines(), neon.stdout.splitlines()
    assert len(lines) > 200
    assert [a for a, b in zip(lines, others, strict=True) if a != b] == []


def test_a_processor_without_dot_products_does_not_get_them(program: Path) -> None:
    assert emulate(program, ["neon"], "cortex-a53").returncode == 2
    assert emulate(program, ["generic"], "cortex-a53").returncode == 0


def test_everything_below_the_bindings_compiles() -> None:
    folders = ("base", "weights", "state", "graph", "runtime", "backend", "backend/cpu", "bench")
    sources = [source for folder in folders for source in sorted((ROOT / "csrc" / folder).glob("*.cpp"))]
    assert len(sources) > 15

    def complaints(source: Path) -> str:
        command = [COMPILER, *FLAGS, "-DLILY_NEON_KERNELS", "-fsyntax-only", str(source)]
        return subprocess.run(command, check=False, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        assert "".join(pool.map(complaints, sources)) == ""
