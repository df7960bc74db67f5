"""lily: Qwen3.5/3.6 hybrid models on the user's own machine."""

from lily_py.engine import Engine
from lily_py.errors import (
    BackendError,
    CheckpointError,
    CheckpointNotFoundError,
    ContextLengthError,
    EngineClosedError,
    InvalidArgumentError,
    LilyError,
    MemoryBudgetError,
    SavedStateError,
    TemplateError,
    UnknownKeywordError,
    UnsupportedModelError,
)
from lily_py.info import EngineInfo
from lily_py.results import Chunk, Result, Timings, TokenLogprob, Usage
from lily_py.session import Session
from lily_py.stream import AsyncStream, Stream
from lily_py.text import ToolCall

__version__ = "0.1.0"

__all__ = [
    "AsyncStream",
    "BackendError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Chunk",
    "ContextLengthError",
    "Engine",
    "EngineClosedError",
    "EngineInfo",
    "InvalidArgumentError",
    "LilyError",
    "MemoryBudgetError",
    "Result",
    "SavedStateError",
    "Session",
    "Stream",
    "TemplateError",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnknownKeywordError",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]
