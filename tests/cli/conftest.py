"""Commands run within the test's process, and the demo model as the library answers with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_support import Input, Ran, Run

import lily_py
from lily_py.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("tokens", "demo", "hi", stdin="")` is the command's status and output."""

    def call(*arguments: str, stdin: str = "", terminal: bool = False) -> Ran:
        monkeypatch.setattr("sys.stdin", Input(stdin, terminal))
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def demo() -> Iterator[lily_py.Engine]:
    """The demo model, for what the library itself answers."""
    with lily_py.Engine.load("demo") as engine:
        yield engine
