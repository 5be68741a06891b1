"""What requests share with each other: one thing per scope, a bounded number of scopes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """One shared thing per scope, made on first use; the scope unused for longest goes first.

    Thread-safe; whether the things themselves are is their own affair.
    """

    def __init__(self, make: Callable[[], T], *, max_scopes: int) -> None:
        self._make = make
        self._max_scopes = max_scopes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()  # guarded by the lock

    def of(self, scope: Hashable) -> T:
        """The scope's thing; None as a scope shares with nobody and gets a new one each time."""
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
        """Scopes held."""
        with self._lock:
            return len(self._held)
