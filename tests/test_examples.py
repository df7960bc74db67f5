"""The scripts in `examples/` and the code of the README, run as a user runs them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")

PRINTED = {
    "generate": [
        r"^answer:  27 \+ 48 = 75\.$",
        r"^thought: .*27 and 48",
        r"^tokens: .* 20 read",
        r"(?m)^sampled: .*9",
    ],
    "stream_cancel": [r"^1, 2, 3", r"^ended: cancelled$", r"^whole: 1, 2, .* 13\.$", r"cache: [1-9]\d*$"],
    "tools": [
        r"^called get_weather\({'city': 'Oslo'}\) -> {'degrees': 8",
        r"^answer: .*8 degrees.*cloudy.*Oslo",
    ],
    "sessions": [
        r"^branch: .*blue owl\.$",
        r"^origin: .*Ada",
        r"^rewound to: \['My name is Ada\.', ",
        r"= 7\.$",
    ],
    "async_program": [
        r"-> 3 \+ 4 = 7\.$",
        r"-> l-i-l-y",
        r"^2, 3, 4, 5, 6\.$",
        r"^cancelled$",
        r"meanwhile: True$",
    ],
    "perplexity": [
        r"^3, 4.*perplexity 1\.\d+ over",
        r"^9, 8.*perplexity \d\d+\.\d+ over",
        r"^'3' .* best: '3'",
    ],
}


def run(*command: str) -> str:
    """Run Python with these arguments; return what it printed."""
    ran = subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES} == set(PRINTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_prints_what_it_promises(path: Path) -> None:
    out = run(str(path))
    for pattern in PRINTED[path.stem]:
        assert re.search(pattern, out, re.MULTILINE), f"{pattern!r} isn't in\n{out}"


def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(block, encoding="utf-8")
    out = run(str(script))
    assert "27 + 48 = 75." in out
    assert "3, 4, 5, 6, 7" in out
    assert "Ada" in out


def test_readme_commands_run() -> None:
    commands = re.findall(r"^lily ([^#\n]*demo[^#\n]*)", README, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"generate", "chat", "info", "tokens"}
    for command in commands:
        run("-m", "lily", *shlex.split(command))


def test_readme_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
