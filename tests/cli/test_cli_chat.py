"""`lily chat` with lines from a pipe: turns, commands, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Run

import lily_py

GREEDY = ("chat", "demo", "--temp", "0", "--no-thinking")


def lines(*typed: str) -> str:
    return "\n".join(typed) + "\n"


def saved(path: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(path.read_text())
    return messages


def test_turns_answer_as_the_library_does_with_the_whole_conversation(run: Run, demo: lily_py.Engine) -> None:
    messages: list[dict[str, Any]] = []
    answers = []
    for question in ("My name is Ada.", "What is my name?"):
        messages.append({"role": "user", "content": question})
        result = demo.chat(messages, temperature=0, thinking=False)
        answers.append(result.text)
        messages.append(result.message)
    ran = run(*GREEDY, stdin=lines("My name is Ada.", "What is my name?"))
    assert (ran.status, ran.out.splitlines()) == (0, answers)
    assert "Ada" in answers[1]


def test_a_pipe_sees_no_prompts_and_the_figures_come_once(run: Run) -> None:
    ran = run(*GREEDY, stdin=lines("What is 3 + 4?", "", "What is 5 + 6?"))
    assert ran.out == "3 + 4 = 7.\n5 + 6 = 11.\n"
    assert [line.split(":")[0] for line in ran.err.splitlines()] == ["Prompt", "Generation", "Peak memory"]


def test_reset_forgets(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    run(*GREEDY, stdin=lines("My name is Ada.", "/reset", "What is 3 + 4?", f"/save {file}"))
    assert [message["content"] for message in saved(file)] == ["What is 3 + 4?", "3 + 4 = 7."]


def test_undo_takes_back_a_turn_and_says_which(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    typed = lines("What is 3 + 4?", "What is 5 + 6?", "/undo", f"/save {file}", "/undo", "/undo")
    ran = run(*GREEDY, stdin=typed)
    assert [message["content"] for message in saved(file)] == ["What is 3 + 4?", "3 + 4 = 7."]
    assert "taken back: What is 5 + 6?" in ran.err
    assert "there is nothing to take back" in ran.err


def test_retry_answers_the_last_message_anew(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    ran = run(*GREEDY, stdin=lines("/retry", "What is 3 + 4?", "/retry", f"/save {file}"))
    assert "nothing to answer" in ran.err
    assert ran.out == "3 + 4 = 7.\n" * 2
    assert [message["role"] for message in saved(file)] == ["user", "assistant"]


def test_a_saved_conversation_goes_on_after_loading(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "with space.json"
    run(*GREEDY, "--system", "Be kind.", stdin=lines("My name is Ada.", f"/save {file}"))
    assert [message["role"] for message in saved(file)] == ["system", "user", "assistant"]
    for arguments, typed in (
        (("--load", str(file)), lines("What is my name?")),
        ((), lines(f"/load {file}", "What is my name?")),
    ):
        assert "Ada" in run(*GREEDY, *arguments, stdin=typed).out


def test_an_object_with_messages_loads_and_text_parts_are_joined(run: Run, tmp_path: Path) -> None:
    file, copy = tmp_path / "in.json", tmp_path / "out.json"
    parts = [{"type": "text", "text": "My name "}, {"type": "text", "text": "is Ada."}]
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    ran = run(*GREEDY, stdin=lines(f"/load {file}", "/retry", f"/save {copy}"))
    assert "loaded 1 messages" in ran.err
    assert "Ada" in ran.out
    assert saved(copy)[0] == {"role": "user", "content": "My name is Ada."}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        ("no json", "isn't JSON"),
        ("[]", "holds no list of messages"),
        ('{"text": 1}', "holds no list of messages"),
        ('[{"content": "x"}]', "messages[0]"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    run: Run, tmp_path: Path, content: str | None, said: str
) -> None:
    file, copy = tmp_path / "bad.json", tmp_path / "out.json"
    if content is not None:
        file.write_text(content)
    ran = run(*GREEDY, stdin=lines("What is 3 + 4?", f"/load {file}", f"/save {copy}"))
    assert ran.status == 0
    assert f"lily: error: {file}: " in ran.err
    assert said in ran.err
    assert len(saved(copy)) == 2
    assert run(*GREEDY, "--load", str(file)).status == 1


def test_an_unwritable_file_is_told_and_the_chat_goes_on(run: Run, tmp_path: Path) -> None:
    typed = lines(
        f"/save {tmp_path / 'none' / 'chat.json'}", "/save ~nobody-here/x", "/save", "What is 3 + 4?"
    )
    ran = run(*GREEDY, stdin=typed)
    assert "can't be written (No such file or directory)" in ran.err
    assert "lily: error: ~nobody-here/x: " in ran.err
    assert "/save needs a file name" in ran.err
    assert ran.out == "3 + 4 = 7.\n"


def test_think_switches_thoughts(run: Run, demo: lily_py.Engine) -> None:
    question = "What is 3 + 4?"
    messages = [{"role": "user", "content": question}]
    thought = demo.chat(messages, temperature=0, thinking=True).reasoning
    typed = lines(
        "/think", "/think on", question, "/reset", "/think off", question, "/think maybe", "/think auto"
    )
    ran = run(*GREEDY, "--show-reasoning", stdin=typed)
    assert thought
    assert ran.out == f"<think>\n{thought}\n</think>\n\n3 + 4 = 7.\n3 + 4 = 7.\n"
    said = [line for line in ran.err.splitlines() if "think" in line]
    assert said == [
        "thinking: off",
        "thinking: on",
        "thinking: off",
        "/think takes on, off or auto, not 'maybe'",
        "thinking: auto",
    ]


def test_system_is_set_and_removed_at_any_time(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    run(
        *GREEDY,
        stdin=lines("What is 3 + 4?", "/system Be brief.", f"/save {first}", "/system", f"/save {second}"),
    )
    assert saved(first)[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in saved(second)] == ["user", "assistant"]


def test_stats_tell_the_context_held(run: Run, demo: lily_py.Engine) -> None:
    usage = demo.generate("What is 3 + 4?", temperature=0, thinking=False).usage
    ran = run(*GREEDY, stdin=lines("What is 3 + 4?", "/stats"))
    assert f"Context: {usage.total_tokens} of 8192 tokens" in ran.err


def test_help_lists_every_command_and_each_is_known(run: Run) -> None:
    ran = run("chat", "demo", stdin=lines("/help"))
    commands = [line.split()[0] for line in ran.err.splitlines() if line.startswith("  /")]
    assert {"/reset", "/save", "/load", "/think", "/system", "/retry", "/undo", "/stats", "/exit"} < set(
        commands
    )
    for command in commands:
        if not command.startswith("//"):
            assert "unknown command" not in run("chat", "demo", stdin=lines(command)).err


def test_an_unknown_command_suggests_the_nearest_and_is_no_message(run: Run) -> None:
    ran = run(*GREEDY, stdin=lines("/rest", "/xyzzy"))
    assert ran.out == ""
    assert "unknown command /rest: did you mean /reset?" in ran.err
    assert "unknown command /xyzzy: /help lists them" in ran.err


def test_exit_ends_before_the_next_line(run: Run) -> None:
    assert run(*GREEDY, stdin=lines("/exit", "What is 3 + 4?")).out == ""


def test_two_slashes_make_a_message_and_a_backslash_continues_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    run(*GREEDY, stdin=lines("//save me", "one\\", "two", f"/save {file}"))
    assert [message["content"] for message in saved(file)][::2] == ["/save me", "one\ntwo"]


def test_a_full_context_is_told_and_the_message_taken_back(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    typed = lines("What is 3 + 4?", "word " * 100, f"/save {file}")
    ran = run(*GREEDY, "--max-context", "64", stdin=typed)
    assert ran.status == 0
    assert "lily: error: " in ran.err
    assert "/undo, /reset or a larger --max-context" in ran.err
    assert [message["content"] for message in saved(file)] == ["What is 3 + 4?", "3 + 4 = 7."]


def test_an_answer_cut_off_says_so(run: Run) -> None:
    assert "cut off after 2 tokens" in run(*GREEDY, "--max-tokens", "2", stdin=lines("What is 3 + 4?")).err
