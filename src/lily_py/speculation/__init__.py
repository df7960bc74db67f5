"""Speculation: drafts of what may follow, verified in one pass; the text stays what it is without."""

from lily_py.speculation.depth import DraftDepth
from lily_py.speculation.prompt_lookup import PromptLookup
from lily_py.speculation.speculation import Drafter, Speculation

__all__ = [
    "DEFAULT_DRAFT_TOKENS",
    "MOST_DRAFT_TOKENS",
    "SPECULATIONS",
    "DraftDepth",
    "Drafter",
    "PromptLookup",
    "Speculation",
]

DEFAULT_DRAFT_TOKENS = 10
MOST_DRAFT_TOKENS = 32

SPECULATIONS = {"prompt_lookup": lambda most: Speculation(PromptLookup(), DraftDepth(), most)}
"""Name, as `Engine.load` takes it -> what makes an answer's speculation of at most so many drafts a pass."""
