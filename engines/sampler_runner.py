"""Runs the sampler's graphs on ONNX Runtime and owns the memory that outlives a call.

Inputs of the host are uploaded in one piece per call, and nothing waits but ``read``. Laws of sampled
drafts stay on the device, one row of memory per slot:

    kept[slot]    [position 0 | position 1 | ... | position max_gamma - 1 | nobody reads this]

so that the slots of a call, which follow one another, are one piece of memory, read and written in
place. Everything else is made anew per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnxruntime

from engines import sampler_tensors as names
from engines.base import EngineError
from engines.onnx_session import enqueue, open_session
from engines.plan_device import DeviceTensor, PlanDevice
from engines.plan_uploads import Downloads, HostArray, Uploads

DeviceValue: TypeAlias = onnxruntime.OrtValue
_FLOAT_BYTES = 4
_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class SamplerRunner:
    """The sessions of a folder of sampler graphs.

    Args:
        folder: the graphs.
        max_batch: slots.
        depth: positions of a slot that laws are kept for.
        vocab_size: V of the target.
        device: where they run.
        num_threads: of the pool that all sessions of the process share.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int,
        depth: int,
        vocab_size: int,
        device: PlanDevice,
        num_threads: int,
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self._folder = folder
        self._max_batch = max_batch
        self.device = device
        self._place = (device.kind, device.index)
        self._uploads = Uploads(device)
        self._downloads = Downloads(device)
        self._num_threads = num_threads
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        # Made when a graph first wants it: greedy and retrieved drafts never do.
        self._kept: int | None = None
        # Values that enqueued graphs read; dropped after a wait.
        self._under_way: list[object] = []

    def run(
        self,
        file: str,
        feeds: Mapping[str, HostArray | DeviceValue | DeviceTensor],
        *,
        slot: int,
        num_rows: int,
    ) -> dict[str, DeviceValue]:
        """Run one graph; its outputs stay on the device.

        Args:
            file: name of the graph.
            feeds: host arrays, contiguous, and device values by input name; all but the kept rows.
            slot: of row 0.
            num_rows: B.

        Raises:
            EngineError: the graph cannot be loaded, or failed.
        """
        session = self._session(file)
        binding = session.io_binding()
        arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        for name, value in {**feeds, **self._uploads.put(arrays)}.items():
            if isinstance(value, DeviceTensor):
                place = (*self._place, value.dtype.type, value.shape, value.pointer)
                binding.bind_input(name, *place)
            else:
                binding.bind_ortvalue_input(name, value)
        if any(tensor.name == names.KEPT_ROWS for tensor in session.get_inputs()):
            shape = (num_rows, 1, self.depth, self.vocab_size)
            place = (*self._place, np.float32, shape, self._kept_pointer(slot))
            binding.bind_input(names.KEPT_ROWS, *place)
        outputs = [tensor.name for tensor in session.get_outputs()]
        for name in outputs:
            if name == names.NEW_KEPT_ROWS:
                binding.bind_output(name, *place)
            else:
                binding.bind_output(name, *self._place)
        try:
            enqueue(session, binding)
        except EngineError as error:
            raise EngineError(f"{file}: {error}") from error
        self._under_way.append(binding)
        return dict(zip(outputs, binding.get_outputs(), strict=True))

    def read(self, values: Sequence[DeviceValue]) -> list[HostArray]:
        """The values on the host, in one copy and one wait; valid until the next call."""
        found = self._downloads.get([as_tensor(value) for value in values])
        self._under_way.clear()
        return found

    def close(self) -> None:
        """Free the device's memory; the device itself is the caller's."""
        self.device.wait()
        self._under_way.clear()
        self._sessions.clear()
        self._uploads.free()
        self._downloads.free()
        if self._kept is not None:
            self.device.free(self._kept)
            self._kept = None

    def _kept_pointer(self, slot: int) -> int:
        if self._kept is None:
            num_values = self._max_batch * self.depth * self.vocab_size
            self._kept = self.device.allocate(_FLOAT_BYTES * num_values)
        return self._kept + slot * _FLOAT_BYTES * self.depth * self.vocab_size

    def _session(self, file: str) -> onnxruntime.InferenceSession:
        if file not in self._sessions:
            path = self._folder / file
            if not path.is_file():
                raise EngineError(f"{self._folder.name}/{file}: no such sampler graph")
            self._sessions[file] = open_session(
                path,
                device=self.device.kind,
                device_index=self.device.index,
                num_threads=self._num_threads,
                stream=self.device.stream,
            )
        return self._sessions[file]


def as_tensor(value: DeviceValue) -> DeviceTensor:
    """Where a value lies; it must outlive the tensor."""
    dtype = np.dtype(_DTYPES[value.data_type()])
    return DeviceTensor(int(value.data_ptr()), tuple(value.shape()), dtype)
