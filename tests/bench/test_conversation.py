"""What earlier turns leave behind: lily's process, llama.cpp's server as it's asked, what states cost."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lily_py.bench import llama_cpp, records
from lily_py.bench.cli import main
from lily_py.bench.conversation import ConversationResult, measure_conversation
from lily_py.bench.conversation_worker import converse
from lily_py.bench.gguf_export import export_gguf
from lily_py.bench.llama_cpp import Setting
from lily_py.bench.llama_server import running
from lily_py.bench.process import ArmError
from lily_py.bench.report import write_report
from lily_py.bench.states import measure_states
from lily_py.bench.states_worker import OPERATIONS
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import InvalidArgumentError

LLAMA_SERVER = """\
#!{python}
# Answers as llama-server does: it remembers the last prompt and its answer, and generates that length.
import http.server, json, sys
options = dict(zip(sys.argv[1:-1], sys.argv[2:]))
known = []
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        global known
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["prompt"], body["n_predict"]
        assert body["temperature"] == 0 and body["ignore_eos"] and body["return_tokens"]
        cached = len(known) if body["cache_prompt"] and prompt[:len(known)] == known else 0
        ids = [len(prompt) % 4096] * count
        known = prompt + ids
        text = json.dumps(dict(tokens=ids, timings=dict(predicted_ms=0.0, cache_n=cached))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def fake_server(tmp_path: Path, synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a GGUF file of the synthetic checkpoint; a llama-server with known answers is found."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv(llama_cpp.BINARIES, str(programs))
    files = tmp_path / "gguf"
    files.mkdir()
    (files / f"{synthetic.name}-Q4_0.gguf").write_bytes(b"GGUF")
    return files


def test_each_turn_sends_all_before_it_and_its_answer() -> None:
    asked: list[list[int]] = []

    def ask(prompt: list[int], count: int) -> tuple[list[int], float, int]:
        asked.append(list(prompt))
        return [9] * count, 0.5, len(prompt) - 1

    found = converse(ask, 4096, (2, 3), 50, 10, reuse=True)
    warm_up, *turns = asked
    assert [len(prompt) for prompt in turns] == [40, 90, 140]
    for before, after in pairwise(turns):
        assert after[: len(before) + 10] == [*before, *[9] * 10]
    assert warm_up[0] != turns[0][0]
    assert found == {"ttft": {2: 0.5, 3: 0.5}, "prompt": {2: 90, 3: 140}, "cached": {2: 89, 3: 139}}
    asked.clear()
    converse(ask, 4096, (2, 3), 50, 10, reuse=False)
    assert [len(prompt) for prompt in asked[1:]] == [90, 140]


def test_lily_and_the_server_are_measured_with_and_without_reuse(synthetic: Path, fake_server: Path) -> None:
    result = measure_conversation(
        str(synthetic),
        turns=(1, 3),
        grow=40,
        answer=6,
        rounds=2,
        llama_settings=[Setting("Q4_0")],
        gguf_folder=fake_server,
    )
    names = ("lily, reusing", "lily, from nothing")
    peers = tuple(f"llama.cpp {Setting('Q4_0')}, {how}" for how in ("reusing", "from nothing"))
    assert tuple(arm.name for arm in result.arms) == (*names, *peers)
    by_name = {arm.name: arm for arm in result.arms}
    assert all(len(samples) == 2 and min(samples) > 0 for arm in result.arms for samples in arm.ttft.values())
    # Turn 3 begins with 2 turns of 40 tokens; the last token of an answer hasn't been computed by lily.
    assert by_name[names[0]].cached == {1: 0, 3: 79}
    assert by_name[peers[0]].cached == {1: 0, 3: 80}
    assert by_name[names[1]].cached == by_name[peers[1]].cached == {1: 0, 3: 0}


def test_a_missing_server_is_said(synthetic: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(llama_cpp.BINARIES, str(tmp_path))
    said: list[str] = []
    result = measure_conversation(
        str(synthetic),
        turns=(1,),
        grow=9,
        answer=2,
        rounds=1,
        llama_settings=[Setting("Q4_0")],
        say=said.append,
    )
    assert [arm.name for arm in result.arms] == ["lily, reusing", "lily, from nothing"]
    assert "no llama-server" in result.notes[0]
    assert result.notes[0] in said


def test_a_server_that_ends_is_an_error() -> None:
    with pytest.raises(ArmError, match="ended with status 3"), running([sys.executable, "-c", "exit(3)"]):
        pass


def test_an_answer_that_fills_its_turn_is_refused(synthetic: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="answer must be between 1 and grow - 1"):
        measure_conversation(str(synthetic), grow=10, answer=10)


def test_states_are_measured_and_both_results_make_a_page(
    synthetic: Path, tmp_path: Path, capsys: Any
) -> None:
    states = measure_states(str(synthetic), contexts=(10, 70), repeats=2)
    assert set(states.seconds) == set(OPERATIONS)
    assert all(spread.low > 0 for each in states.seconds.values() for spread in each.values())
    # The longer one has a page of keys and values more.
    assert states.file_bytes[70] - states.file_bytes[10] == pytest.approx(64 * states.token_bytes, rel=0.01)
    folder = tmp_path / "results"
    command = [
        "conversation",
        str(synthetic),
        "--turns",
        "1,2",
        "--grow",
        "30",
        "--answer",
        "4",
        "--rounds",
        "1",
    ]
    assert main([*command, "--save", str(folder)]) == 0
    assert "turn 2 (56 tokens)" in capsys.readouterr().out
    records.save(states, folder, "lily bench states tiny")
    found = records.load_folder(folder)
    assert found[1].result == states
    result = found[0].result
    assert isinstance(result, ConversationResult)
    assert result.arms[0].cached[2] == 29
    write_report(found, tmp_path / "page.md", "lily bench report", folder)
    page = (tmp_path / "page.md").read_text()
    assert "## tiny: the next turn of a conversation" in page
    assert "- llama.cpp: not measured: no settings were asked for" in page
    assert "A snapshot takes 420.0 KiB" in page


def test_gguf_files_hold_the_vocabulary(synthetic: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install 'lily-py[bench]'")
    checkpoint = open_checkpoint(synthetic)
    export_gguf(checkpoint, tmp_path / "out.gguf", progress=False)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == checkpoint.config.vocab_size
    assert len(set(tokens)) == len(tokens)
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == "<|im_end|>"
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert {tokens[i] for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }
