"""The static check refuses what Apple's compiler refuses, names the line, and accepts correct kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from metalsim import paths
from metalsim.msl import frontend, static_check, vocabulary
from metalsim_helpers import CORPUS, KERNELS

# Copying a whole struct out of constant memory is fine for Apple's compiler, but not for OpenCL's.
KNOWN_FALSE_POSITIVES = {"good_02_struct_copy_constant"}
LANGUAGE = {"good_03_lambda": "3.2", "tensor": "4.0"}


def check(path: Path, language: str | None = None) -> list[str]:
    return static_check.check(path, language=language or LANGUAGE.get(path.stem, frontend.DEFAULT_LANGUAGE))


@pytest.mark.parametrize("path", sorted(CORPUS.glob("bad_*.metal")), ids=lambda p: p.stem)
def test_bad_program_is_refused(compiler: Path, path: Path) -> None:
    assert any("error:" in message for message in check(path))


@pytest.mark.parametrize(
    "path", [*sorted(CORPUS.glob("good_*.metal")), *sorted(KERNELS.glob("*.metal"))], ids=lambda p: p.stem
)
def test_good_program_is_accepted(compiler: Path, path: Path) -> None:
    assert (check(path) != []) == (path.stem in KNOWN_FALSE_POSITIVES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "bad_01_device_to_thread",
            "bad_01_device_to_thread.metal:4:36: error: no matching function for call to 'f'",
        ),
        ("bad_08_helper_ptr_no_space", "bad_08_helper_ptr_no_space.metal:3: error: 'p'"),
        ("bad_21_recursion", "recursion through 'f'"),
        (
            "bad_32_bfloat_from_float",
            "bad_32_bfloat_from_float.metal:3: error: no implicit conversion to bfloat",
        ),
        ("bad_36_mixed_position_widths", "must all have the same number of components"),
        ("bad_39_unknown_library_name", "'mad' is not on the list"),
        (
            "bad_55_literal_of_long_long",
            "bad_55_literal_of_long_long.metal:3: error: '1ull' is a literal of long long",
        ),
        ("bad_56_signed_literal_of_long_long", "write '0xffL'"),
    ],
)
def test_message_has_the_place_and_the_reason(compiler: Path, name: str, text: str) -> None:
    assert text in "\n".join(check(CORPUS / f"{name}.metal"))


def test_features_of_a_later_language_version(compiler: Path) -> None:
    for name in ("bad_35_lambda_before_3_2", "bad_46_fence_before_3_2"):
        assert check(CORPUS / f"{name}.metal", "3.2") == []


def test_every_instantiation_is_checked(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "k.metal"
    source.write_text(
        """#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = exp(a[1]); }
template [[host_name("f32")]] [[kernel]] decltype(k<float>) k<float>;
template [[host_name("bf16")]] [[kernel]] decltype(k<bfloat>) k<bfloat>;
"""
    )
    messages = "\n".join(check(source))
    assert "no matching function for call to 'exp'" in messages
    assert "k<__bf16>" in messages
    assert "k<float>" not in messages


def declared(shim: str) -> set[str]:
    """Identifiers in the shim's headers, with the macros for group functions and atomics written out."""
    text = "".join(header.read_text() for header in (paths.SHIM / shim).glob("*.hpp"))
    names = set(re.findall(r"\w+", text))
    names |= {group + name for group in ("simd", "quad") for name in re.findall(r"group##(_\w+)", text)}
    return names | {
        f"atomic_{n}_explicit" for n in re.findall(r"METALSIM_ATOMIC_OPERATION\(space, (\w+)\)", text)
    }


@pytest.mark.parametrize("shim", ["exec", "check"])
def test_both_shims_have_the_vocabulary(shim: str) -> None:
    assert vocabulary.names() - declared(shim) == set()


def test_vocabulary_has_no_name_twice() -> None:
    lines = (Path(vocabulary.__file__).parent / "vocabulary.txt").read_text().splitlines()
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    assert sorted(set(words)) == sorted(words)
    assert set(words) == vocabulary.names()
