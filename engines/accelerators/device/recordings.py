"""Records runs that come again as CUDA graphs. Knows nothing of the library that runs them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

from outrider.engines.accelerators.device.base import NotRecordedError, Recording

log = logging.getLogger(__name__)


class Recordings:
    """Recordings by key; the one that was not used for longest makes room for a new one.

    A run is recorded when it is met for the second time: recording costs more than a run, and many
    shapes of a server that is filling up are met once. Once one could not be recorded, none is tried any more: each
    trial may leave a context behind.

    Args:
        name: of what runs, for the log.
        most: recordings kept, and keys remembered that were met once; 0 to record nothing.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._met: OrderedDict[Hashable, None] = OrderedDict()

    def run(
        self,
        key: Hashable,
        enqueue: Callable[[], None],
        record: Callable[[], Recording],
    ) -> None:
        """Enqueue a run.

        Args:
            key: runs with equal keys are the same.
            enqueue: does it without a recording.
            record: does it once, and returns a recording of it; raises NotRecordedError where it did it and cannot
                record it.
        """
        recording = self._kept.get(key)
        if recording is not None:
            self._kept.move_to_end(key)
            recording.launch()
        elif key in self._met:
            del self._met[key]
            try:
                self._kept[key] = record()
            except NotRecordedError as error:
                log.warning("%s: its runs cannot be recorded: %s", self._name, error)
                self.close()
                self._most = 0
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].close()
        else:
            if self._most:
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
