"""Command-line options of `cross-build`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.description = (
        "Compile C++ sources and nanobind into an arm64 macOS extension module, and check it."
    )
    parser.add_argument("--source", action="append", type=Path, required=True, help="C++ file; repeat")
    parser.add_argument(
        "--output", type=Path, required=True, help="the extension to write, for example _core.abi3.so"
    )
    parser.add_argument("--target", default="14.0", help="oldest macOS (default 14.0)")
    parser.add_argument("--include", action="append", type=Path, default=[], help="include folder; repeat")
    parser.add_argument("--define", action="append", default=[], help="macro, NAME or NAME=VALUE; repeat")
    parser.add_argument(
        "--nanobind", type=Path, help="nanobind's package folder (default: the installed one)"
    )
    parser.add_argument("--no-nanobind", action="store_true", help="a plain dylib without Python")
    parser.add_argument("--python-include", type=Path, help="CPython headers (default: of this interpreter)")
    parser.add_argument(
        "--stable-abi", default="", help="CPython version of the stable ABI, for example 3.12"
    )
    parser.add_argument("--warnings-as-errors", action="store_true", help="-Werror for the given sources")
