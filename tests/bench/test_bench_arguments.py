"""Bad arguments end in one line that names the argument, before anything is measured."""

from __future__ import annotations

import pytest

from lily_py.bench.cli import main


@pytest.mark.parametrize(
    "command",
    ["run", "rows", "concurrent", "conversation", "states", "profile", "speculation", "ablate", "start"],
)
def test_a_checkpoint_that_is_not_there_is_said_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nowhere"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("lily bench: 'nowhere' is neither")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", "--decode"),
        ("run", "--rounds"),
        ("run", "--threads"),
        ("rows", "--repeats"),
        ("concurrent", "--decode"),
        ("states", "--repeats"),
        ("start", "--rounds"),
        ("conversation", "--rounds"),
        ("profile", "--decode"),
        ("ablate", "--decode"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_count_that_is_none_is_refused_by_name(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "demo", option, value])
    assert stopped.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err
