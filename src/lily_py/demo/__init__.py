"""The demo checkpoint that ships with lily: a working miniature of the model family, not an assistant."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of the demo checkpoint (MLX layout, 4 bits)."""
    return Path(__file__).resolve().parent
