"""Things that requests share: one per scope, a bounded number of scopes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """One shared thing per scope, made on first use; the scope unused for longest goes first.

    Thread-safe; the things themselves need not be.
    """

    def __init__(self, make: Callable[[], T], *, max_scopes: int) -> None:
        self._make = make
        self._max_scopes = max_scopes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()  # guarded by the lock

    def of(self, scope: Hashable) -> T:
        """Return the scope's thing; a new one each time for None, which shares nothing."""
        if scope is None:
            return self._make()
        with self._lock:
            found = self._held.get(scope)
            if found is None:
                found = self._held[scope] = self._make()
            self._held.move_to_end(scope)
            while len(self._held) > self._max_scopes:
                self._held.popitem(last=False)
            return found

    def __len__(self) -> int:
        """Return the number of scopes held."""
        with self._lock:
            return len(self._held)
