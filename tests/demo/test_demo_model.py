"""The demo checkpoint: its question suite, that its data stay out of it, its template, its answers."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from demo.data import MIX, WARM_UP, Sampler, assistant, user  # noqa: E402
from demo.judge import calls_in, judge  # noqa: E402
from demo.questions import held_out  # noqa: E402
from demo.text import Template, answers_of, pack  # noqa: E402

FOLDER = ROOT / "src/lily_py/demo"
SUITE = Path(__file__).with_name("questions.json")
QUESTIONS: list[dict[str, Any]] = json.loads(SUITE.read_text())


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return Template().compiled.render(messages=messages, **options)


def test_suite_has_at_least_ten_questions_of_each_of_seven_kinds() -> None:
    kinds = Counter(q["kind"] for q in QUESTIONS)
    assert set(kinds) == {"add", "echo", "spell", "count", "memory", "tool_call", "tool_result"}
    assert min(kinds.values()) >= 10
    assert len({q["id"] for q in QUESTIONS}) == len(QUESTIONS) >= 70
    assert {q["thinking"] for q in QUESTIONS} == {True, False}


def test_training_data_never_holds_a_word_or_a_sum_of_the_suite() -> None:
    words = {key.split(":")[1] for q in QUESTIONS for key in q["held_out"] if key.startswith("word:")}
    sums = {tuple(map(int, key[4:].split(","))) for key in held_out(SUITE) if key.startswith("sum:")}
    assert len(words) > 50
    assert len(sums) >= 12
    sampler, template = Sampler(5, held_out(SUITE)), Template()
    for mix in (WARM_UP, MIX):
        for _ in range(3000):
            text = template.render(sampler.conversation(mix))
            assert words.isdisjoint(re.findall(r"[a-z]+", text.lower()))
            drawn = re.findall(r"(?<!\d)(\d{1,2}) (?:\+|plus) (\d{1,2}) ?(?:=|\?|<)", text)
            assert sums.isdisjoint((min(int(x), int(y)), max(int(x), int(y))) for x, y in drawn)


def test_same_seed_gives_the_same_conversations() -> None:
    first, second = Sampler(3), Sampler(3)
    assert [first.conversation(MIX) for _ in range(50)] == [second.conversation(MIX) for _ in range(50)]


def test_packing_keeps_conversations_whole_and_counts_the_ones_it_drops() -> None:
    items = [(np.arange(n, dtype=np.int32) + 1, np.zeros(n, bool)) for n in (5, 9, 3, 12)]
    ids, classes, dropped = pack(items, ["a", "b", "a", "c"], 10, 0)
    assert dropped == {"c": 1}
    assert sorted("".join(map(str, row)).rstrip("0") for row in ids) == ["123450123", "123456789"]
    assert ((classes == 0).sum(), (classes == 1).sum()) == (0, 20)


def test_every_assistant_turn_is_learned_without_what_the_generation_prompt_holds() -> None:
    text = render([user("a"), assistant("b", "why"), user("c"), assistant("d", "because")])
    assert [text[start:end] for start, end in answers_of(text)] == [
        "b<|im_end|>\n",
        "because\n</think>\n\nd<|im_end|>\n",
    ]
    text = render([user("a"), assistant("b", "")])
    assert [text[start:end] for start, end in answers_of(text)] == ["b<|im_end|>\n"]


def test_template_drops_thinking_before_the_last_query_unless_told_to_keep_it() -> None:
    messages = [user("a"), assistant("b", "why"), user("c")]
    assert "why" not in render(messages)
    assert "<think>\nwhy\n</think>\n\nb" in render(messages, preserve_thinking=True)


def test_template_keeps_thinking_within_a_tool_loop() -> None:
    call = {"function": {"name": "f", "arguments": {"s": "x", "flag": True, "list": [1, "é"]}}}
    messages = [user("a"), assistant("", "why", tool_calls=[call]), {"role": "tool", "content": "1"}]
    text = render([*messages, {"role": "tool", "content": "2"}], add_generation_prompt=True)
    assert "<think>\nwhy\n</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n" in text
    assert "<parameter=flag>\ntrue\n</parameter>\n" in text
    assert '<parameter=list>\n[1, "é"]\n</parameter>\n</function>\n</tool_call><|im_end|>\n' in text
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_template_closes_the_think_block_when_thinking_is_off() -> None:
    assert render([user("a")], add_generation_prompt=True, enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "empty"),
        ([user("a"), {"role": "critic", "content": "b"}], "Unknown message role: critic"),
        ([user("a"), {"role": "system", "content": "b"}], "system message must come first"),
        ([{"role": "system", "content": "b"}], "no user query"),
        ([user([{"type": "image", "image": "x"}])], "text only"),  # type: ignore[arg-type]
    ],
)
def test_template_refuses_what_it_cannot_render(messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(messages)


def test_judge_wants_the_exact_call_and_an_ended_thought() -> None:
    question = next(q for q in QUESTIONS if q["kind"] == "tool_call" and q["thinking"])
    (call,) = question["expect"]["tool_calls"]
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call["arguments"].items())
    said = f"<tool_call>\n<function={call['name']}>\n{body}</function>\n</tool_call>"
    assert calls_in(said, question["tools"]) == [call]
    assert judge(question, "I call.\n</think>\n\n" + said)
    assert not judge(question, "I call.\n" + said)
    assert not judge(question, "</think>\n\n" + said.replace("</parameter>", "x\n</parameter>"))


def test_checkpoint_is_at_most_eight_megabytes_and_every_tensor_is_in_its_index() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir() if f.is_file()) <= 8_000_000
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in FOLDER.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file.name))
    assert found == index
    assert any(name.startswith("mtp.") for name in found)


def test_checkpoint_ships_the_template_that_it_was_trained_with() -> None:
    assert (FOLDER / "chat_template.jinja").read_text() == (
        ROOT / "tools/demo/chat_template.jinja"
    ).read_text()


@pytest.mark.slow
def test_mlx_lm_answers_nearly_all_of_the_suite_greedily() -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    from demo.evaluate import answers

    wrong = [q["id"] for q, a in zip(QUESTIONS, answers(FOLDER, QUESTIONS), strict=True) if not judge(q, a)]
    assert len(wrong) <= 0.05 * len(QUESTIONS), wrong
