"""The host as a device that is as late as a real one may be, and knows what crosses its border."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from outrider.engines.accelerators.device.base import HostDevice, Staging


class Copy(NamedTuple):
    """Bytes of the host that take part in a copy under way: the memory, what it holds in truth, and
    the marks set before it."""

    image: np.ndarray
    values: np.ndarray
    num_marked: int


class StrictDevice(HostDevice):
    """Refuses what only works where enqueuing is doing.

    What an upload reads must stay as it is until a mark behind it was waited for; what a download
    brings is there only then. Addresses that are bound elsewhere are checked with ``owns``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uploaded: list[Copy] = []
        self._downloaded: list[Copy] = []

    def owns(self, pointer: int, num_bytes: int) -> bool:
        """Whether bytes lie in memory that this device gave."""
        return any(
            array.ctypes.data <= pointer and pointer + num_bytes <= array.ctypes.data + array.nbytes
            for array in self._memory.values()
        )

    def upload(self, destination: int, source: Staging, num_bytes: int) -> None:
        super().upload(destination, source, num_bytes)
        image = source.array[:num_bytes]
        self._uploaded.append(Copy(image, image.copy(), self.traffic.num_marked))

    def download(self, destination: Staging, source: int, num_bytes: int) -> None:
        super().download(destination, source, num_bytes)
        image = destination.array[:num_bytes]
        self._downloaded.append(Copy(image, image.copy(), self.traffic.num_marked))
        image.fill(0xAA)

    def wait(self, mark: int | None = None) -> None:
        super().wait(mark)
        for copy in self._uploaded:
            assert (copy.image == copy.values).all(), "an upload was overwritten before it was done"
        reached = self.traffic.num_reached
        for copy in self._downloaded:
            if copy.num_marked < reached:
                copy.image[...] = copy.values
        self._uploaded = [copy for copy in self._uploaded if copy.num_marked >= reached]
        self._downloaded = [copy for copy in self._downloaded if copy.num_marked >= reached]
