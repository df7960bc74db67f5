"""Exit statuses, and errors that say what to type instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_support import Run

import lily_py
from lily_py import cli


def error_line(err: str) -> str:
    """The one line of an error, without its prefix."""
    assert re.fullmatch(r"lily: error: [^\n]+\n", err), err
    return err.removeprefix("lily: error: ").strip()


def test_version_is_that_of_the_library(run: Run) -> None:
    ran = run("--version")
    assert (ran.status, ran.out) == (0, f"lily {lily_py.__version__}\n")


@pytest.mark.parametrize("command", ["", "generate", "chat", "info", "tokens", "bench"])
def test_help_is_printed_on_stdout(run: Run, command: str) -> None:
    ran = run(*command.split(), "--help")
    assert (ran.status, ran.err) == (0, "")
    assert f"usage: lily {command}".strip() in ran.out


def test_help_lists_the_commands(run: Run) -> None:
    assert set(re.findall(r"^    (\w+) ", run("--help").out, re.MULTILINE)) == {
        "generate",
        "chat",
        "info",
        "tokens",
        "selftest",
        "bench",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "COMMAND"),
        ("generat demo hi", "generat"),
        ("generate", "MODEL"),
        ("generate demo --sead 3 hi", "--sead 3"),
        ("generate demo --seed x hi", "--seed"),
        ("generate demo two words", "needs quotes"),
        ("generate demo hi --raw --system x", "--raw"),
        ("generate demo hi --backend gpu", "'cpu'"),
        ("generate demo hi --speculation eagle", "'prompt_lookup'"),
        ("info demo more", "more"),
        ("bench nothing", "nothing"),
    ],
)
def test_wrong_usage_is_2_and_named(run: Run, arguments: str, said: str) -> None:
    ran = run(*arguments.split())
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("usage: lily")
    assert said in ran.err


def test_a_terminal_is_not_waited_for(run: Run) -> None:
    for command, missing in (("generate", "PROMPT"), ("tokens", "TEXT")):
        ran = run(command, "demo", terminal=True)
        assert ran.status == 2
        assert f"no {missing}" in ran.err


def test_unknown_model_names_the_one_that_ships(run: Run) -> None:
    ran = run("generate", "Qwen", "hi")
    assert ran.status == 1
    assert 'lily generate demo "What is 27 + 48?"' in error_line(ran.err)


def test_a_misspelt_folder_suggests_its_neighbour(run: Run, tmp_path: Path) -> None:
    (tmp_path / "Qwen3.6-35B").mkdir()
    for command in (("generate", "hi"), ("info",), ("tokens", "hi"), ("chat",)):
        ran = run(command[0], str(tmp_path / "Qwen3.6-3B"), *command[1:])
        assert ran.status == 1
        assert error_line(ran.err).endswith(f"did you mean {str(tmp_path / 'Qwen3.6-35B')!r}?")


def test_a_folder_above_the_checkpoint_suggests_the_one_below(run: Run, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    ran = run("info", str(tmp_path / "models--a--b"))
    assert ran.status == 1
    assert error_line(ran.err).endswith(f"did you mean {str(snapshot)!r}?")


def test_a_weight_file_asks_for_its_folder(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "pass the folder" in error_line(run("generate", str(file), "hi").err)


def test_info_never_downloads_unasked(run: Run) -> None:
    ran = run("info", "lily-tests/no-such-repository")
    assert ran.status == 1
    assert "lily info --download lily-tests/no-such-repository" in error_line(ran.err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temp", "-1"], "temperature must be between 0"),
        (["--max-tokens", "0"], "max_tokens must be between 1"),
        (["--threads", "0"], "threads"),
        (["--max-context", "3"], "context"),
        (["--memory-limit", "lots"], "memory_limit must be a size"),
        (["--memory-limit", "1KB"], "too small"),
        (["--backend", "metal"], "no Metal backend"),
        (["--draft-tokens", "4"], "needs an engine that speculates"),
        (["--speculation", "prompt_lookup", "--draft-tokens", "33"], "draft_tokens must be between 0 and 32"),
    ],
)
def test_impossible_values_are_1_and_named(run: Run, arguments: Sequence[str], said: str) -> None:
    ran = run("generate", "demo", "Hello there, how are you today?", *arguments)
    assert (ran.status, ran.out) == (1, "")
    assert said in error_line(ran.err)


def test_an_empty_prompt_is_an_error(run: Run) -> None:
    assert "empty" in error_line(run("generate", "demo", stdin="").err)


def test_ctrl_c_while_loading_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lily_py.Engine, "load", interrupted)
    assert run("generate", "demo", "hi").status == 130


def test_bench_gets_its_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def bench(arguments: Sequence[str] | None = None) -> int:
        seen.append(list(arguments or ()))
        return 7

    monkeypatch.setattr("lily_py.bench.main", bench)
    assert cli.main(["bench", "run", "--help", "--", "-x"]) == 7
    assert seen == [["run", "--help", "--", "-x"]]


def command(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lily", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_input_that_is_no_text_is_an_error() -> None:
    ran = command("tokens", "demo", stdin=b"caf\xe9", PYTHONIOENCODING="utf-8:strict")
    assert ran.returncode == 1
    assert "stdin isn't utf-8 text" in error_line(ran.stderr.decode())


def test_an_output_without_a_character_shows_a_question_mark() -> None:
    ran = command("tokens", "demo", "--ids", "-", stdin=b"127 102", PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stdout) == (0, b"?\n")


def test_module_and_closed_pipe() -> None:
    """`python -m lily` is the command; a reader that has enough isn't an error to complain of."""
    command = [sys.executable, "-m", "lily", "tokens", "demo", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("word " * 20_000)
        process.stdin.close()
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_a_benchmark_ends_quietly_too() -> None:
    """`lily bench estimate | head -1` and Ctrl-C."""
    contexts = ",".join(["256"] * 5000)
    command = [sys.executable, "-m", "lily", "bench", "estimate", "--chip", "m1", "--contexts", contexts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_ctrl_c_ends_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lily_py.bench.main", interrupted)
    assert cli.main(["bench", "run"]) == 130
