"""Reflection describes what a kernel binds; the rewriter keeps lines and reports places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from metalsim import build, paths
from metalsim.msl import frontend
from metalsim.msl.lexer import SourceError, TokenStream
from metalsim.msl.reflection import reflect
from metalsim.objects import CompileError
from metalsim.simulator import Simulator
from metalsim_helpers import KERNELS

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n\n"


def test_attention_kernel(compiler: Path) -> None:
    described = reflect(frontend.load(KERNELS / "attn.metal"))
    kernels = {kernel["name"]: kernel for kernel in described["kernels"]}
    assert list(kernels) == ["attn_decode_f16_128", "attn_decode_f32_64", "mm8"]
    assert described["function_constants"] == [{"name": "window", "type": "int", "index": 3}]
    arguments = {a["name"]: a for a in kernels["attn_decode_f16_128"]["arguments"]}
    assert arguments["q"] == {
        "name": "q", "type": "const device T*", "kind": "buffer", "index": 0,
        "address_space": "device", "access": "read", "reference": False,
    }  # fmt: skip
    assert arguments["out"]["access"] == "read_write"
    assert (arguments["p"]["address_space"], arguments["p"]["reference"]) == ("constant", True)
    assert (arguments["merge"]["kind"], arguments["merge"]["index"]) == ("threadgroup", 0)
    assert arguments["lane"]["builtin"] == "thread_index_in_simdgroup"
    assert [v["name"] for v in kernels["attn_decode_f16_128"]["threadgroup_variables"]] == ["m_sh", "l_sh"]


def test_optional_argument_and_thread_limit(compiler: Path) -> None:
    gemv = reflect(frontend.load(KERNELS / "q4_gemv.metal"))["kernels"][0]
    residual = next(a for a in gemv["arguments"] if a["name"] == "residual")
    assert (residual["index"], residual["function_constant"]) == (4, "has_residual")
    scan = next(k for k in reflect(frontend.load(KERNELS / "sort.metal"))["kernels"] if k["name"] == "scan")
    assert scan["max_total_threads_per_threadgroup"] == 256


def test_command_line_prints_json(compiler: Path) -> None:
    command = [sys.executable, "-m", "metalsim", "reflect", str(KERNELS / "sort.metal")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=paths.HOME.parent).stdout
    assert [kernel["name"] for kernel in json.loads(output)[0]["kernels"]] == ["hist", "scan", "scatter"]


def test_loaded_library_agrees_with_the_declarations(sim: Simulator) -> None:
    library = sim.compile(KERNELS / "attn.metal")
    # m_sh and l_sh: 8 floats each, placed at multiples of 16 bytes.
    assert library.threadgroup_memory("attn_decode_f16_128") == 64
    assert library.threadgroup_memory("mm8") == 0
    assert sim.compile(KERNELS / "sort.metal").max_threads("scan") == 256


def test_attribute_brackets_are_told_from_subscripts() -> None:
    stream = TokenStream("x [[buffer(0)]]; y = a[b[i]];")
    assert [t.text for t in stream.tokens if "[" in t.text or "]" in t.text] == [
        "[[",
        "]]",
        "[",
        "[",
        "]",
        "]",
    ]


def test_compile_errors_have_the_line_of_the_source(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.metal"
    source.write_text(HEAD + "kernel void k(device int* a) { a[0] = 1; }\n")
    with pytest.raises(
        SourceError, match=r"broken\.metal:4: error: kernel k: parameter 'device int\* a' has no"
    ):
        build.compile_kernels(source)
    source.write_text(HEAD + "kernel void k(device int* a [[buffer(0)]]) { a[0] = b; }\n")
    with pytest.raises(CompileError, match=r"broken\.metal:4:\d+: error: use of undeclared identifier 'b'"):
        build.compile_kernels(source)


def test_compiled_kernels_are_cached_by_content(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "cached.metal"
    text = HEAD + "kernel void k(device int* a [[buffer(0)]]) { a[0] = 1; }\n"
    source.write_text(text)
    first = build.compile_kernels(source)
    written = first.stat().st_mtime_ns
    assert build.compile_kernels(source) == first
    assert first.stat().st_mtime_ns == written
    source.write_text(text.replace("= 1", "= 2"))
    assert build.compile_kernels(source) != first
    assert build.compile_kernels(source, checked=False) not in (first, build.compile_kernels(source))
