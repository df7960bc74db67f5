"""Commands at a terminal: a process behind a pseudo-terminal, keys typed, the screen read."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lily_py import demo

SECONDS = 30.0
"""Longest wait for anything."""


class Screen:
    """A process at a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process = process
        self.text = ""
        self._keyboard = keyboard

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._keyboard, b"\x03")

    def interrupt_at_prompt(self, pattern: str) -> None:
        """Press Ctrl-C until the pattern appears: readline loses one that comes right after a key."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self.interrupt()
            if self._find(pattern, min(deadline, time.monotonic() + 1.0)) is not None:
                return
        pytest.fail(f"{pattern!r} never came; the screen shows {self.text!r}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until the pattern appears in what hasn't been matched yet; forget all up to its end."""
        match = self._find(pattern, time.monotonic() + SECONDS)
        if match is None:
            pytest.fail(f"{pattern!r} never came; the screen shows {self.text!r}")
        return match

    def wait(self) -> int:
        """Read to the end; return the exit status."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(timeout=SECONDS)

    def _find(self, pattern: str, deadline: float) -> re.Match[str] | None:
        while True:
            match = re.search(pattern, self.text)
            if match is not None:
                self.text = self.text[match.end() :]
            if match is not None or not self._read(deadline):
                return match

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # how Linux reports that the other side has closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@contextmanager
def lily(*arguments: str, **environment: str) -> Iterator[Screen]:
    """`with lily("chat", "demo") as screen` starts the command at a terminal of its own."""
    keyboard, terminal = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lily", *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**variables, "TERM": "xterm", **environment},
        preexec_fn=_take_terminal,
    )
    os.close(terminal)
    try:
        yield Screen(process, keyboard)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(keyboard)


def _take_terminal() -> None:
    """Make the terminal on stdin the process's own, so that Ctrl-C reaches it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_generate_streams_with_a_dimmed_thought() -> None:
    with lily("generate", "demo", "What is 3 + 4?", "--temp", "0", "--thinking") as screen:
        thought = screen.wait_for(r"\x1b\[2m(.+?)\x1b\[0m\r\n\r\n3 \+ 4 = 7\.\r\n")[1]
        assert "3 and 4" in thought
        assert screen.wait() == 0
        assert re.findall(r"[A-Z][a-z ]+:", screen.text) == ["Prompt:", "Generation:", "Peak memory:"]


def test_no_color_is_respected() -> None:
    with lily("generate", "demo", "What is 3 + 4?", "--temp", "0", "--thinking", NO_COLOR="1") as screen:
        assert screen.wait() == 0
        assert "\x1b[" not in screen.text
        assert "<think>\r\n" in screen.text


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model without end tokens and with a long context: an answer goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(demo.path(), folder)
    for name in ("config", "generation_config", "tokenizer_config"):
        path = folder / f"{name}.json"
        values = json.loads(path.read_text())
        for part in (values, values.get("text_config", {})):
            for key in ("eos_token_id", "eos_token"):
                part.pop(key, None)
            if "max_position_embeddings" in part:
                part["max_position_embeddings"] = 1 << 20
        path.write_text(json.dumps(values))
    return str(folder)


def test_ctrl_c_ends_generate_with_130_and_its_figures(endless: str) -> None:
    with lily("generate", endless, "What is 3 + 4?", "--temp", "0", "--max-tokens", "1000000") as screen:
        screen.wait_for("3 and 4")
        screen.interrupt()
        assert screen.wait() == 130
        assert "Generation: " in screen.text
        assert "Traceback" not in screen.text


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(endless: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with lily("chat", endless, "--max-tokens", "1000000", "--temp", "0", "--no-thinking") as screen:
        for _ in range(2):
            screen.wait_for("> ")
            screen.type("What is 3 + 4?\n")
            screen.wait_for(r"\r\n3 \+ 4 = 7\.")
            screen.interrupt()
            screen.wait_for("stopped; /retry answers anew, /undo takes the message back")
        screen.wait_for("> ")
        screen.type(f"/save {file}\n")
        screen.wait_for("saved 4 messages")
        screen.type("/exit\n")
        assert screen.wait() == 0
        assert "Traceback" not in screen.text
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert all(message["content"].startswith("3 + 4 = 7.") for message in messages[1::2])


def test_chat_prompts_answers_and_leaves_on_ctrl_d() -> None:
    with lily("chat", "demo", "--temp", "0", "--no-thinking") as screen:
        screen.wait_for(r"demo, context 8,192 tokens.*\n")
        screen.wait_for("> ")
        screen.type("What is 3 + 4?\n")
        screen.wait_for(r"\r\n3 \+ 4 = 7\.\r\n")
        screen.wait_for("> ")
        screen.type("one\\\n")
        screen.wait_for(r"\.\.\. ")
        screen.type("two\n")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.wait() == 0
        assert "Peak memory" in screen.text


def test_ctrl_c_at_the_prompt_drops_the_line_and_stays() -> None:
    with lily("chat", "demo", "--temp", "0", "--no-thinking") as screen:
        screen.wait_for("> ")
        screen.type("half a line")
        screen.wait_for("half a line")
        screen.interrupt_at_prompt("Ctrl-D or /exit leaves")
        screen.wait_for("> ")
        screen.type("What is 3 + 4?\n")
        screen.wait_for(r"\r\n3 \+ 4 = 7\.\r\n")
        screen.type("/exit\n")
        assert screen.wait() == 0
