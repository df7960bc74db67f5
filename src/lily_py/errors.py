"""The exceptions of lily: everything a user can cause or meet derives from :class:`LilyError`."""

__all__ = [
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ContextLengthError",
    "EngineClosedError",
    "InvalidArgumentError",
    "LilyError",
    "MemoryBudgetError",
    "SavedStateError",
    "TemplateError",
    "UnknownKeywordError",
    "UnsupportedModelError",
]


class LilyError(Exception):
    """Root of lily's exceptions: catch it to catch all of them."""


class InvalidArgumentError(LilyError, ValueError):
    """An argument has a wrong type or an impossible value; the message names both."""


class ContextLengthError(InvalidArgumentError):
    """A prompt, or prompt and answer together, is longer than the context that was set up."""


class CheckpointError(LilyError, ValueError):
    """A checkpoint's files are damaged, contradictory or incomplete; names the file and the tensor or key."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file that it promises, does not exist."""

    def __str__(self) -> str:
        """Return the message; `OSError` would show its arguments instead."""
        return str(self.args[0]) if self.args else ""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its architecture or number format isn't one that lily runs."""


class TemplateError(LilyError, ValueError):
    """A conversation can't be rendered by the checkpoint's chat template; names the message at fault."""


class MemoryBudgetError(LilyError, MemoryError):
    """The work doesn't fit in the memory limit; says what is needed and what is allowed."""


class SavedStateError(LilyError, ValueError):
    """A saved session or state is damaged, or belongs to another model or setting; names both."""


class BackendError(LilyError, RuntimeError):
    """A compute backend isn't available here or failed while running."""


class EngineClosedError(LilyError, RuntimeError):
    """The engine was used after `close()`."""


class UnknownKeywordError(LilyError, TypeError):
    """A keyword argument that isn't known; the message suggests the nearest one."""
