"""Command line: `python -m metalsim COMMAND` with tools/ on PYTHONPATH.

setup                      fetch the compiler and the metal-cpp headers
build                      build libmetalsim.so
package                    build lily with the Metal backend on the simulator; prints the folder for sys.path
check FILE.metal...        static check: types, address spaces, lint, vocabulary
reflect FILE.metal...      kernels and their bindings as JSON
compile FILE.metal         kernel library for the simulator; prints its path
flags                      compiler and linker flags for host code, for build systems
run-tests [ARGUMENTS...]   pytest on tests/metalsim
cross-build ...            arm64 macOS extension (see --help)
wheel-macos                lily's wheel for Apple Silicon
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import build, paths
from .msl.frontend import DEFAULT_LANGUAGE, load
from .msl.lexer import SourceError
from .objects import CompileError
from .toolchain import ToolchainError, set_up

Command = Callable[[argparse.Namespace], int]


def _setup(_: argparse.Namespace) -> int:
    compiler, headers = set_up()
    print(f"compiler: {compiler}\nmetal-cpp: {headers}")
    return 0


def _build(_: argparse.Namespace) -> int:
    print(build.build_library())
    return 0


def _package(_: argparse.Namespace) -> int:
    from .extension import build_package

    print(build_package())
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    options = {"include": arguments.include, "define": arguments.define, "language": arguments.language}
    print(build.compile_kernels(arguments.file, checked=arguments.checked, **options))
    return 0


def _reflect(arguments: argparse.Namespace) -> int:
    from .msl.reflection import reflect

    options = {"include": arguments.include, "define": arguments.define, "language": arguments.language}
    modules = [load(file, **options) for file in arguments.files]
    errors = [error for module in modules for error in module.errors]
    if errors:
        raise SourceError("\n".join(errors))
    print(json.dumps([reflect(module) for module in modules], indent=2))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from .msl.static_check import check

    failed = 0
    for file in arguments.files:
        messages = check(
            file, include=arguments.include, define=arguments.define, language=arguments.language
        )
        failed += bool(messages)
        print("\n".join(messages) if messages else f"{file}: ok")
    print(f"{len(arguments.files) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _flags(_: argparse.Namespace) -> int:
    build.build_library()
    flags = {"compiler": [str(set_up()[0]), "c++"], "compile": build.host_flags(), "link": build.link_flags()}
    print(json.dumps(flags, indent=2))
    return 0


def _run_tests(arguments: argparse.Namespace) -> int:
    tests = paths.REPOSITORY / "tests" / "metalsim"
    return subprocess.call([sys.executable, "-m", "pytest", str(tests), *arguments.arguments])


def _cross_build(arguments: argparse.Namespace) -> int:
    from .macos.cross_build import run_command

    return run_command(arguments)


def _wheel_macos(arguments: argparse.Namespace) -> int:
    from .macos.wheel import run_command

    return run_command(arguments)


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-I", dest="include", action="append", type=Path, default=[], help="include folder")
    parser.add_argument("-D", dest="define", action="append", default=[], help="macro, NAME or NAME=VALUE")
    parser.add_argument("--language", default=DEFAULT_LANGUAGE, help="Metal language version")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metalsim", description="Metal on Linux, for tests")
    commands = parser.add_subparsers(dest="command", required=True)
    plain: dict[str, Command] = {"setup": _setup, "build": _build, "package": _package, "flags": _flags}
    for name, function in plain.items():
        commands.add_parser(name).set_defaults(function=function)
    on_files: dict[str, Command] = {"check": _check, "reflect": _reflect}
    for name, function in on_files.items():
        command = commands.add_parser(name)
        command.add_argument("files", nargs="+", type=Path)
        _add_source_options(command)
        command.set_defaults(function=function)
    command = commands.add_parser("compile")
    command.add_argument("file", type=Path)
    _add_source_options(command)
    command.add_argument("--checked", action="store_true", default=True, help="for the checker (default)")
    command.add_argument("--fast", dest="checked", action="store_false", help="without instrumentation")
    command.set_defaults(function=_compile)
    commands.add_parser("run-tests").set_defaults(function=_run_tests)
    command = commands.add_parser("cross-build")
    from .macos.arguments import add_arguments

    add_arguments(command)
    command.set_defaults(function=_cross_build)
    command = commands.add_parser("wheel-macos")
    command.add_argument(
        "--output", type=Path, default=paths.REPOSITORY / "dist", help="folder (default: dist)"
    )
    command.set_defaults(function=_wheel_macos)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and options.command != "run-tests":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.arguments = others
    try:
        return int(options.function(options))
    except (SourceError, CompileError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
