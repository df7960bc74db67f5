"""The arm64 macOS build of a tiny extension, and what its checks find."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from metalsim.macos import cross_build, macho, selectors
from metalsim.objects import CompileError
from metalsim_helpers import HERE, HOST

EXTENSION = HERE / "macos" / "extension.cpp"


@pytest.fixture(scope="module")
def extension(compiler: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, cross_build.Report]:
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed")
    output = tmp_path_factory.mktemp("macos") / "tiny.cpython-311-darwin.so"
    options = cross_build.Options(
        sources=[EXTENSION, HOST / "metal_impl.cpp"],
        output=output,
        nanobind_folder=cross_build.nanobind_folder(),
        warnings_as_errors=True,
    )
    return output, cross_build.cross_build(options)


def test_extension_is_a_signed_arm64_dylib(extension: tuple[Path, cross_build.Report]) -> None:
    binary = extension[1].binary
    assert (binary.file_type, binary.minimum_macos, binary.is_signed) == ("dylib", "14.0", True)
    assert "_PyInit_tiny" in binary.exported
    assert "/System/Library/Frameworks/Metal.framework/Versions/A/Metal" in binary.libraries


def test_only_python_is_left_to_be_found_at_run_time(extension: tuple[Path, cross_build.Report]) -> None:
    undefined = {symbol.name: symbol for symbol in extension[1].binary.undefined}
    assert undefined["_PyErr_SetString"].library is None
    assert undefined["_MTLCreateSystemDefaultDevice"].library is not None
    assert undefined["_objc_msgSend"].library is not None


def test_selectors_in_use_are_listed(extension: tuple[Path, cross_build.Report]) -> None:
    used = extension[1].selectors
    assert "newLibraryWithSource:options:error:" in used
    assert "newHeapWithDescriptor:" not in used  # declared by metal-cpp, not sent by the extension
    assert selectors.check(used, "14.0") == []


def test_unknown_and_too_new_selectors_are_refused() -> None:
    assert selectors.check(["frobnicate:"], "14.0") == [
        "selector 'frobnicate:' is not on the list in selectors.txt"
    ]
    assert selectors.check(["architecture"], "13.0") == [
        "selector 'architecture' needs macOS 14.0, the target is 13.0"
    ]
    assert selectors.check(["setMathMode:"], "14.0") == []  # guarded by the host


def test_undefined_symbol_is_found(compiler: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "typo.cpp", tmp_path / "typo.so"
    source.write_text('extern "C" int not_anywhere(); extern "C" int f() { return not_anywhere(); }\n')
    with pytest.raises(cross_build.CrossBuildError, match="nothing has its symbol _not_anywhere"):
        cross_build.cross_build(cross_build.Options(sources=[source], output=output))


def test_compile_error_is_passed_on(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return nope; }\n")
    with pytest.raises(CompileError, match="undeclared identifier 'nope'"):
        cross_build.cross_build(cross_build.Options(sources=[source], output=tmp_path / "broken.so"))


def test_other_files_are_no_mach_o(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(struct.pack("<8I", 0xFEEDFACF, 0x01000007, 3, 6, 0, 0, 0, 0))
    with pytest.raises(macho.MachOError, match="not a 64-bit arm64"):
        macho.read(path)
