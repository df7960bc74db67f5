"""Wrong usage, and the keywords of a generation as they are typed."""

from __future__ import annotations

import argparse

from lily_py.sampling import Keywords


class UsageError(Exception):
    """Options that can't stand together, or a missing one: reported with the usage line, exit status 2."""


def sampling_keywords(options: argparse.Namespace) -> Keywords:
    """Return the options as keywords of `Engine.stream`; None is the checkpoint's default."""
    return {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": options.seed,
        "draft_tokens": options.draft_tokens,
        "stop": options.stop,
        "thinking": options.thinking,
    }
