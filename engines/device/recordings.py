"""Records runs that come again. Knows nothing of how a run is recorded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol


class Recording(Protocol):
    """A run that can be started again as it was."""

    def launch(self) -> None:
        """Enqueue it."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class _Unrecorded:
    """Stands for a run that cannot be recorded."""

    def __init__(self, enqueue: Callable[[], None]) -> None:
        self.launch = enqueue

    def close(self) -> None:
        """Nothing is held."""


class Recordings:
    """Recordings by key; the one that was not used for longest makes room for a new one.

    A run is recorded when it is met for the second time: recording costs more than a run, and many
    shapes of a server that is filling up are met once.

    Args:
        most: recordings kept, and keys remembered that were met once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._met: OrderedDict[Hashable, None] = OrderedDict()

    def run(
        self,
        key: Hashable,
        enqueue: Callable[[], None],
        record: Callable[[], Recording | None],
    ) -> None:
        """Enqueue a run.

        Args:
            key: runs with equal keys are the same.
            enqueue: does it without a recording.
            record: does it once, and returns a recording of it; None where it cannot be recorded,
                which is then not tried again while the key is kept.
        """
        recording = self._kept.get(key)
        if recording is not None:
            self._kept.move_to_end(key)
            recording.launch()
        elif key in self._met:
            del self._met[key]
            self._kept[key] = record() or _Unrecorded(enqueue)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].close()
        else:
            self._met[key] = None
            if len(self._met) > self._most:
                self._met.popitem(last=False)
            enqueue()

    def close(self) -> None:
        """Free all recordings and forget what was met."""
        for recording in self._kept.values():
            recording.close()
        self._kept.clear()
        self._met.clear()
