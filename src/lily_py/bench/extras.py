"""Optional packages, asked for when they're needed."""

from __future__ import annotations

import importlib
from typing import Any

from lily_py.errors import InvalidArgumentError


def require(package: str) -> Any:
    """Import a package of the extra ``bench``.

    Raises:
        InvalidArgumentError: it isn't installed; the message says how to get it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InvalidArgumentError(
            f"the package {package.split('.')[0]!r} is needed ({error}); install it with: "
            "pip install 'lily-py[bench]'"
        ) from None
