"""From what a user typed to a model: loading it, and what to type instead."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from lily_py.checkpoint.files import existing_path
from lily_py.engine import Engine

_SEARCHED = ("*/config.json", "snapshots/*/config.json")
"""Where the checkpoint lies in folders that people take for one, the Hugging Face cache among them."""


def load_engine(options: argparse.Namespace) -> Engine:
    """Load the model that the options name."""
    return Engine.load(
        options.model,
        backend=options.backend,
        mtp=options.mtp,
        max_context=options.max_context,
        memory_limit=options.memory_limit,
        threads=options.threads,
        kv_dtype=options.kv_dtype,
        revision=options.revision,
        speculation=options.speculation,
    )


def model_hint(name: str) -> str:
    """Return what a user could have meant by a model's name that isn't there, as the end of a sentence."""
    path = existing_path(name)
    if path is None:
        return _missing_hint(name)
    if not path.is_dir():
        return ""
    for pattern in _SEARCHED:
        found = sorted(path.glob(pattern))
        if found:
            return f"; did you mean {str(found[-1].parent)!r}?"
    return ""


def _missing_hint(name: str) -> str:
    try:
        path = Path(name).expanduser()
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except (OSError, RuntimeError, ValueError):
        siblings = []
    else:
        nearest = difflib.get_close_matches(path.name, siblings, 1, 0.75)
        if nearest:
            return f"; did you mean {str(path.parent / nearest[0])!r}?"
    if "/" in name:
        return ""
    return "; 'demo' is the model that ships with lily: lily generate demo \"What is 27 + 48?\""
