"""Objects for as long as somebody else keeps them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """A set that keeps nothing alive. Any thread may change it, and look through it meanwhile."""

    def __init__(self) -> None:
        self._objects: weakref.WeakSet[T] = weakref.WeakSet()
        self._lock = threading.RLock()
        """Taken again by the same thread when the garbage collector ends something meanwhile."""

    def __iter__(self) -> Iterator[T]:
        # A copy: a weak set can't be looked through while another thread adds to it.
        with self._lock:
            return iter(list(self._objects))

    def add(self, item: T) -> None:
        """Add an object."""
        with self._lock:
            self._objects.add(item)

    def discard(self, item: T) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            self._objects.discard(item)
