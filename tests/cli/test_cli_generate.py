"""`lily generate`: the library's answer, streamed, with the figures that people paste."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cli_support import Run

import lily_py

QUESTION = "Count from 3 to 9."


def test_prints_the_answer_of_the_library(run: Run, demo: lily_py.Engine) -> None:
    ran = run("generate", "demo", QUESTION, "--seed", "5")
    assert (ran.status, ran.out) == (0, demo.generate(QUESTION, seed=5).text + "\n")


def test_the_demo_model_counts(run: Run) -> None:
    assert "3, 4, 5, 6, 7, 8, 9" in run("generate", "demo", QUESTION, "--temp", "0", "--no-thinking").out


def test_figures_follow_on_stderr(run: Run, demo: lily_py.Engine) -> None:
    usage = demo.generate(QUESTION, seed=5).usage
    lines = run("generate", "demo", QUESTION, "--seed", "5").err.splitlines()
    assert re.fullmatch(rf"Prompt: {usage.prompt_tokens} tokens, \d+\.\d tokens/s", lines[0])
    assert re.fullmatch(rf"Generation: {usage.completion_tokens} tokens, \d+\.\d tokens/s", lines[1])
    assert re.fullmatch(r"Peak memory: \d+\.\d{3} GB", lines[2])
    assert run("generate", "demo", QUESTION, "--quiet").err == ""


def test_drafts_are_told_and_change_nothing_else(run: Run, demo: lily_py.Engine) -> None:
    question = "Repeat: one two one two one two one two"
    ran = run("generate", "demo", question, "--temp", "0", "--speculation", "prompt_lookup")
    assert ran.out == demo.generate(question, temperature=0).text + "\n"
    assert re.search(r"Generation: \d+ tokens \(\d+ of \d+ drafts accepted\), ", ran.err)


def test_json_is_one_object_with_the_whole_result(run: Run, demo: lily_py.Engine) -> None:
    expected = demo.generate(QUESTION, seed=5, thinking=True)
    ran = run("generate", "demo", QUESTION, "--seed", "5", "--thinking", "--json")
    answer = json.loads(ran.out)
    assert ran.err == ""
    assert answer["text"] == expected.text
    assert answer["reasoning"] == expected.reasoning
    assert answer["token_ids"] == list(expected.token_ids)
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["seed"] == 5
    assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert answer["timings"]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_pipe_is_read_without_an_argument_or_with_a_dash(
    run: Run, demo: lily_py.Engine, arguments: tuple[str, ...]
) -> None:
    ran = run("generate", "demo", "--seed", "5", *arguments, stdin=QUESTION)
    assert ran.out == demo.generate(QUESTION, seed=5).text + "\n"


def test_an_argument_wins_over_a_pipe(run: Run, demo: lily_py.Engine) -> None:
    ran = run("generate", "demo", "--seed", "5", QUESTION, stdin="What is 1 + 1?")
    assert ran.out == demo.generate(QUESTION, seed=5).text + "\n"


OPTIONS: dict[str, Any] = {
    "temperature": 4.0,
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.2,
    "seed": 3,
    "draft_tokens": 5,
    "max_tokens": 40,
    "thinking": False,
}


def test_options_reach_the_engine_under_their_names(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = lily_py.Engine.stream

    def stream(engine: lily_py.Engine, prompt: Any, **keywords: Any) -> lily_py.Stream:
        seen.append({name: value for name, value in keywords.items() if value is not None})
        return real(engine, prompt, **keywords)

    monkeypatch.setattr(lily_py.Engine, "stream", stream)
    words = ["--no-thinking"]
    for name, value in OPTIONS.items():
        words += [] if name == "thinking" else [f"--{name.replace('_', '-')}", str(value)]
    words += ["--speculation", "prompt_lookup"]
    for command in (("generate", "demo", QUESTION), ("chat", "demo")):
        assert run(*command, *words, "--stop", "a", "--stop", "b", stdin=QUESTION).status == 0
    assert seen == [{**OPTIONS, "stop": ["a", "b"]}] * 2
    run("generate", "demo", QUESTION, "--temp", "2", "--thinking", "--raw")
    assert seen[2] == {"temperature": 2.0, "thinking": True, "raw": True}


def test_loading_options_reach_the_engine_under_their_names(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def load(path: str, **keywords: Any) -> None:
        seen.append({"path": path, **keywords})
        raise lily_py.LilyError("seen")

    monkeypatch.setattr(lily_py.Engine, "load", load)
    typed = "--backend cpu --mtp head --max-context 512 --memory-limit 2GB --threads 3 --revision v1"
    typed += " --kv-dtype int8 --speculation prompt_lookup"
    for command in (("generate", "a/b", QUESTION), ("chat", "a/b")):
        assert run(*command, *typed.split()).status == 1
    expected = {
        "path": "a/b",
        "backend": "cpu",
        "mtp": "head",
        "max_context": 512,
        "memory_limit": "2GB",
        "threads": 3,
        "kv_dtype": "int8",
        "revision": "v1",
        "speculation": "prompt_lookup",
    }
    assert seen == [expected] * 2


def test_system_message_is_seen(run: Run, demo: lily_py.Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    answer = json.loads(run("generate", "demo", QUESTION, "--system", "Be brief.", "--json").out)
    assert answer["usage"]["prompt_tokens"] == demo.count_tokens(messages) > demo.count_tokens(QUESTION)


def test_raw_text_is_continued_without_template(run: Run, demo: lily_py.Engine) -> None:
    answer = json.loads(run("generate", "demo", "1, 2, 3,", "--raw", "--max-tokens", "2", "--json").out)
    assert answer["usage"]["prompt_tokens"] == len(demo.tokenize("1, 2, 3,"))


def test_stop_texts_end_the_answer(run: Run) -> None:
    arguments = ("generate", "demo", QUESTION, "--temp", "0", "--no-thinking", "--json")
    answer = json.loads(run(*arguments, "--stop", "never", "--stop", " 6").out)
    assert (answer["text"], answer["stop"]) == ("3, 4, 5,", " 6")


def test_an_answer_cut_off_says_so(run: Run) -> None:
    ran = run("generate", "demo", QUESTION, "--max-tokens", "2")
    assert ran.err.startswith("cut off after 2 tokens")
    assert "--max-tokens" in ran.err


def test_the_thought_stays_out_of_a_pipe_unless_asked_for(run: Run, demo: lily_py.Engine) -> None:
    expected = demo.generate(QUESTION, seed=5, thinking=True)
    arguments = ("generate", "demo", QUESTION, "--seed", "5", "--thinking")
    assert run(*arguments).out == f"{expected.text}\n"
    shown = run(*arguments, "--show-reasoning").out
    assert shown == f"<think>\n{expected.reasoning}\n</think>\n\n{expected.text}\n"


def test_mtp_head_can_be_named(run: Run, tmp_path: object) -> None:
    ran = run("generate", "demo", "hi", "--mtp", f"{tmp_path}/none.safetensors")
    assert ran.status == 1
    assert "none.safetensors" in ran.err
