"""Things that requests share: one per scope, a bounded number of scopes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


def _owner(scope: Hashable) -> Hashable:
    """Return whose a scope is: its name before the salt (``core.drafting.salted_scope_of``)."""
    return scope.partition("/")[0] if isinstance(scope, str) else scope


class Scoped(Generic[T]):
    """One shared thing per scope, made on first use.

    The one unused for longest goes first: of the asker's own scopes where it has others, else of all.
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
            if len(self._held) > self._max_scopes:
                # Salts make many scopes of one tenant: those are its own to lose first.
                own = _owner(scope)
                same = (one for one in self._held if one != scope and _owner(one) == own)
                del self._held[next(same, next(iter(self._held)))]
            return found

    def __len__(self) -> int:
        """Return the number of scopes held."""
        with self._lock:
            return len(self._held)
