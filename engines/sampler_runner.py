"""Runs the sampler's graphs on ONNX Runtime and owns the memory that outlives a call.

Laws of sampled drafts stay on the device, one row of memory per slot:

    kept[slot]    [position 0 | position 1 | ... | position max_gamma - 1 | nobody reads this]

so that the slots of a call, which follow one another, are one piece of memory, read and written in
place. Everything else is made anew per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from engines import sampler_tensors as names
from engines.base import EngineError
from engines.onnx_session import LIBRARY_ERRORS, open_session

DeviceValue: TypeAlias = onnxruntime.OrtValue
HostArray = npt.NDArray[np.float32] | npt.NDArray[np.int64]
_FLOAT_BYTES = 4


class SamplerRunner:
    """The sessions of a folder of sampler graphs.

    Args:
        folder: the graphs.
        max_batch: slots.
        depth: positions of a slot that laws are kept for.
        vocab_size: V of the target.
        device: "cpu" or "cuda".
        num_threads: of the pool that all sessions of the process share.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int,
        depth: int,
        vocab_size: int,
        device: str,
        num_threads: int,
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self._folder = folder
        self._max_batch = max_batch
        self._device = device
        self._num_threads = num_threads
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        # Made when a graph first wants it: greedy and retrieved drafts never do.
        self._kept: DeviceValue | None = None

    def run(
        self, file: str, feeds: Mapping[str, HostArray | DeviceValue], *, slot: int, num_rows: int
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
        for name, value in feeds.items():
            if not isinstance(value, np.ndarray):
                binding.bind_ortvalue_input(name, value)
            else:
                binding.bind_cpu_input(name, value)
        if any(tensor.name == names.KEPT_ROWS for tensor in session.get_inputs()):
            shape = (num_rows, 1, self.depth, self.vocab_size)
            place = (self._device, 0, np.float32, shape, self._kept_pointer(slot))
            binding.bind_input(names.KEPT_ROWS, *place)
        outputs = [tensor.name for tensor in session.get_outputs()]
        for name in outputs:
            if name == names.NEW_KEPT_ROWS:
                binding.bind_output(name, *place)
            else:
                binding.bind_output(name, self._device)
        try:
            session.run_with_iobinding(binding)
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed in {file}: {error}") from error
        return dict(zip(outputs, binding.get_outputs(), strict=True))

    def _kept_pointer(self, slot: int) -> int:
        if self._kept is None:
            shape = (self._max_batch, 1, self.depth, self.vocab_size)
            zeros = np.zeros(shape, dtype=np.float32)
            self._kept = DeviceValue.ortvalue_from_numpy(zeros, self._device, 0)
        slot_bytes = _FLOAT_BYTES * self.depth * self.vocab_size
        return int(self._kept.data_ptr()) + slot * slot_bytes

    def _session(self, file: str) -> onnxruntime.InferenceSession:
        if file not in self._sessions:
            path = self._folder / file
            if not path.is_file():
                raise EngineError(f"{self._folder.name}/{file}: no such sampler graph")
            self._sessions[file] = open_session(
                path, device=self._device, num_threads=self._num_threads
            )
        return self._sessions[file]
