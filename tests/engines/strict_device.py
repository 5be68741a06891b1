"""The host as a device that is as late as a real one may be, and knows what crosses its border."""

from __future__ import annotations

import numpy as np

from engines.plan_device import HostDevice, Staging


class StrictDevice(HostDevice):
    """Refuses what only works where enqueuing is doing.

    What an upload reads must stay as it is until the next wait; what a download brings is there only
    then. Addresses that are bound elsewhere are checked with ``owns``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uploaded: list[tuple[np.ndarray, np.ndarray]] = []
        self._downloaded: list[tuple[np.ndarray, np.ndarray]] = []

    def owns(self, pointer: int, num_bytes: int) -> bool:
        """Whether bytes lie in memory that this device gave."""
        return any(
            array.ctypes.data <= pointer and pointer + num_bytes <= array.ctypes.data + array.nbytes
            for array in self._memory.values()
        )

    def upload(self, destination: int, source: Staging, num_bytes: int) -> None:
        super().upload(destination, source, num_bytes)
        image = source.array[:num_bytes]
        self._uploaded.append((image, image.copy()))

    def download(self, destination: Staging, source: int, num_bytes: int) -> None:
        super().download(destination, source, num_bytes)
        image = destination.array[:num_bytes]
        self._downloaded.append((image, image.copy()))
        image.fill(0xAA)

    def wait(self) -> None:
        super().wait()
        for image, values in self._uploaded:
            assert (image == values).all(), "an upload was overwritten before it was done"
        for image, values in self._downloaded:
            image[...] = values
        self._uploaded.clear()
        self._downloaded.clear()
