"""Copies between the host and a device: arrays in, one piece at a time, and out.

Copies are enqueued, so what they read must stay as it is until the device has been waited for. Each
upload therefore takes memory of its own, which is free again once a mark behind it has been waited for:

    upload 0 | run | upload 1 | run | ... | download | mark | upload 2 | run      enqueued
                                                          wait for the mark | upload 0 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from outrider.engines.accelerators.device.base import (
    ALIGNMENT,
    DeviceTensor,
    PlanDevice,
    Rows,
    Staging,
)

HostArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTokens:
    """Tokens of an extend that are on the device already: a block of one tensor.

    Attributes:
        source: [B, any] int64.
        rows: rows of the extend, and of the source.
        column: of the extend's tokens, the first that is replaced.
        width: columns of the source, from its first on.
    """

    source: DeviceTensor
    rows: range
    column: int
    width: int

    def write(self, device: PlanDevice, tokens: DeviceTensor) -> None:
        """Enqueue the copy into tokens [B, T] int64."""
        size = tokens.dtype.itemsize
        pitches = (tokens.shape[1] * size, self.source.shape[1] * size)
        device.copy_rows(
            Rows(tokens.pointer + self.rows.start * pitches[0] + self.column * size, pitches[0]),
            Rows(self.source.pointer + self.rows.start * pitches[1], pitches[1]),
            width=self.width * size,
            rows=len(self.rows),
        )


class StagingBuffer:
    """One piece of device memory with its image on the host, made anew when it is too small."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._num_bytes = 0
        self._pointer = 0
        self._staging: Staging | None = None

    def make(self, num_bytes: int) -> tuple[int, Staging]:
        """Address and image of at least so many bytes; nothing may be under way in them."""
        if self._staging is None or num_bytes > self._num_bytes:
            self.free()
            self._num_bytes = num_bytes
            self._pointer = self._device.allocate(num_bytes)
            self._staging = self._device.stage(num_bytes)
        return self._pointer, self._staging

    def free(self) -> None:
        """Give both back."""
        if self._staging is not None:
            self._device.free(self._pointer)
            self._staging.free()
            self._staging = None


class Uploads:
    """Arrays of calls that are enqueued one after another, each call's in one piece."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._rooms: list[StagingBuffer] = []
        # Marks that had been set when each room was last used: the next one is behind its use.
        self._used_at: list[int] = []

    def put(self, arrays: Mapping[str, HostArray]) -> dict[str, DeviceTensor]:
        """Enqueue a copy of all arrays.

        Returns:
            By name where they will be, valid until a mark that follows has been waited for. In a
            step like the last one these are the same places.
        """
        room = self._free_room()
        offsets, total = [], 0
        for array in arrays.values():
            offsets.append(total)
            total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        # An empty list still has an address.
        total += ALIGNMENT
        pointer, staging = room.make(total)
        found: dict[str, DeviceTensor] = {}
        for (name, array), offset in zip(arrays.items(), offsets, strict=True):
            image = staging.array[offset : offset + array.nbytes].view(array.dtype)
            image.reshape(array.shape)[...] = array
            found[name] = DeviceTensor(pointer + offset, array.shape, array.dtype)
        self._device.upload(pointer, staging, total)
        return found

    def free(self) -> None:
        """Give the memory back; nothing may be under way."""
        for room in self._rooms:
            room.free()
        self._rooms.clear()
        self._used_at.clear()

    def _free_room(self) -> StagingBuffer:
        traffic = self._device.traffic
        for index, used_at in enumerate(self._used_at):
            if used_at < traffic.num_reached:
                self._used_at[index] = traffic.num_marked
                return self._rooms[index]
        self._rooms.append(StagingBuffer(self._device))
        self._used_at.append(traffic.num_marked)
        return self._rooms[-1]


class InputPlace:
    """Memory that a graph reads its uploads from: always at one address, for every size.

    Copies into it follow the graph that read the last content, as all is enqueued in order.
    """

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        # Twice as much as is asked for, so that few sizes ever move it.
        self._memory = OutputPlace(device, spare=2)

    def take(self, tensors: Mapping[str, DeviceTensor]) -> dict[str, DeviceTensor]:
        """Enqueue a copy of tensors that ``Uploads.put`` laid out in one piece."""
        begin = min(tensor.pointer for tensor in tensors.values())
        end = max(tensor.pointer + tensor.num_bytes for tensor in tensors.values())
        size = end - begin
        pointer = self._memory.take(size)
        self._device.copy_rows(Rows(pointer, size), Rows(begin, size), width=size, rows=1)
        return {
            name: DeviceTensor(pointer + tensor.pointer - begin, tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
        }

    def free(self) -> None:
        """Give the memory back; the device finishes before it does."""
        self._memory.free()


class OutputPlace:
    """Memory for a graph's output, read before the next run: at one address while it is large enough.

    Args:
        device: whose memory it is.
        spare: times as much is allocated as is asked for.
    """

    def __init__(self, device: PlanDevice, *, spare: int = 1) -> None:
        self._device, self._spare = device, spare
        self._pointer = 0
        self._num_bytes = 0

    def take(self, num_bytes: int) -> int:
        """Address of so many bytes, of any content."""
        if num_bytes > self._num_bytes:
            self.free()
            size = self._spare * num_bytes
            self._pointer, self._num_bytes = self._device.allocate(size), size
        return self._pointer

    def free(self) -> None:
        """Give the memory back; the device finishes before it does."""
        if self._num_bytes:
            self._device.free(self._pointer)
            # Should there be no memory for more: nothing is left to free.
            self._pointer = self._num_bytes = 0


class PendingDownload:
    """Tensors that are under way to the host.

    They will lie one after another in ``staging``.
    """

    def __init__(
        self, device: PlanDevice, staging: Staging, tensors: Sequence[DeviceTensor]
    ) -> None:
        self._device, self._staging, self._tensors = device, staging, tensors
        self._mark = device.mark()

    def arrays(self) -> list[HostArray]:
        """Wait for them, once; they are valid until others are sent for."""
        self._device.wait(self._mark)
        found, begin = [], 0
        for tensor in self._tensors:
            piece = self._staging.array[begin : begin + tensor.num_bytes]
            found.append(np.frombuffer(piece.data, dtype=tensor.dtype).reshape(tensor.shape))
            begin += tensor.num_bytes
        return found


class Downloads:
    """Sends for tensors: several in one piece, with one copy and one wait."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._room = StagingBuffer(device)

    def send(self, tensors: Sequence[DeviceTensor]) -> PendingDownload:
        """Enqueue the copy; what is enqueued from now on is not waited for with it."""
        total = sum(tensor.num_bytes for tensor in tensors)
        pointer, staging = self._room.make(total)
        begin = pointer
        for tensor in tensors if len(tensors) > 1 else ():
            places = (Rows(begin, tensor.num_bytes), Rows(tensor.pointer, tensor.num_bytes))
            self._device.copy_rows(*places, width=tensor.num_bytes, rows=1)
            begin += tensor.num_bytes
        where = pointer if len(tensors) > 1 else tensors[0].pointer
        self._device.download(staging, where, total)
        return PendingDownload(self._device, staging, tensors)

    def get(self, tensors: Sequence[DeviceTensor]) -> list[HostArray]:
        """The tensors on the host, valid until others are sent for."""
        return self.send(tensors).arrays()

    def free(self) -> None:
        """Give the memory back."""
        self._room.free()
