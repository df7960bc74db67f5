"""Every exception of lily can be caught as `LilyError`, and as the built-in that Python users expect."""

from __future__ import annotations

import pickle

import pytest

from lily_py import errors

EXPECTED = {
    errors.InvalidArgumentError: ValueError,
    errors.ContextLengthError: errors.InvalidArgumentError,
    errors.CheckpointError: ValueError,
    errors.CheckpointNotFoundError: FileNotFoundError,
    errors.UnsupportedModelError: errors.CheckpointError,
    errors.TemplateError: ValueError,
    errors.MemoryBudgetError: MemoryError,
    errors.SavedStateError: ValueError,
    errors.BackendError: RuntimeError,
    errors.EngineClosedError: RuntimeError,
    errors.UnknownKeywordError: TypeError,
}


def test_the_tree_is_complete() -> None:
    assert {error.__name__ for error in EXPECTED} | {"LilyError"} == set(errors.__all__)


@pytest.mark.parametrize(("error", "builtin"), EXPECTED.items(), ids=lambda value: value.__name__)
def test_each_is_caught_by_both_and_keeps_its_message(
    error: type[errors.LilyError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin) as as_builtin:
        raise error("config.json: bits must be 4")
    assert isinstance(as_builtin.value, errors.LilyError)
    assert str(as_builtin.value) == "config.json: bits must be 4"
    assert str(pickle.loads(pickle.dumps(as_builtin.value))) == "config.json: bits must be 4"
