"""Memory that graphs write on a device: a piece per call, free again after a wait.

Pieces are handed out in the order of calls, as with uploads (``transfers``). So the same step finds its
tensors at the same addresses again, and a recording of it stays good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from outrider.engines.accelerators.device.base import ALIGNMENT, DeviceTensor, PlanDevice

Sizes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Results:
    """Tensors of calls that are enqueued one after another, each call's in one piece."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._pieces: list[tuple[int, int]] = []
        self._num_used = 0
        self._num_waits = device.traffic.num_waits

    def make(self, sizes: Sizes) -> dict[str, DeviceTensor]:
        """Tensors of the given shapes and types, of any content, valid until the next wait."""
        if self._num_waits != self._device.traffic.num_waits:
            self._num_waits = self._device.traffic.num_waits
            self._num_used = 0
        offsets, total = [], 0
        for shape, dtype in sizes.values():
            offsets.append(total)
            total += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        pointer = self._piece(max(total, ALIGNMENT))
        return {
            name: DeviceTensor(pointer + offset, shape, dtype)
            for (name, (shape, dtype)), offset in zip(sizes.items(), offsets, strict=True)
        }

    def free(self) -> None:
        """Give the memory back; nothing may be under way."""
        for pointer, _ in self._pieces:
            self._device.free(pointer)
        self._pieces.clear()
        self._num_used = 0

    def _piece(self, num_bytes: int) -> int:
        index = self._num_used
        self._num_used += 1
        if index == len(self._pieces):
            self._pieces.append((self._device.allocate(num_bytes), num_bytes))
        pointer, room = self._pieces[index]
        if room < num_bytes:
            self._device.free(pointer)
            pointer = self._device.allocate(num_bytes)
            self._pieces[index] = (pointer, num_bytes)
        return pointer
