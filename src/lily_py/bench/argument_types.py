"""What the arguments of ``lily bench`` are made of."""

from __future__ import annotations

import argparse

from lily_py.bench.llama_cpp import Setting
from lily_py.errors import InvalidArgumentError


def positive(text: str) -> int:
    """Read a count of at least one."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Read counts with commas between them."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a list of numbers such as 128,512") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers must be positive")
    return found


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(part for part in text.split(",") if part)


def settings(text: str) -> tuple[Setting, ...]:
    """Read llama.cpp's settings with commas between them."""
    try:
        return tuple(Setting.parse(part) for part in text.split(","))
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
