"""Runs the stages of the sampler's rounds, and owns all of their memory.

Inputs of the host are uploaded in one piece per call, outputs are written to memory of the device,
and nothing waits but ``downloads``. Probabilities of sampled drafts stay, one row of memory per slot:

    kept[slot]    [position 0 | position 1 | ... | position max_gamma - 1 | nobody reads this]

so that the slots of a call, which follow one another, are one piece of memory, read and written in
place. Everything else is free again after the next wait.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from outrider.engines.accelerators.device.base import DeviceTensor, PlanDevice
from outrider.engines.accelerators.device.results import Results
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.kernels.launches import Kernels, Launches
from outrider.engines.accelerators.device.sampling.tensors import Stage
from outrider.engines.accelerators.device.transfers import Downloads, HostArray, Uploads

_FLOAT32 = np.dtype(np.float32)


class SamplerRunner:
    """The kernels of a sampler over one device; it closes them.

    It keeps probabilities for ``depth`` positions of each slot.
    """

    def __init__(
        self, kernels: Kernels, *, max_batch: int, depth: int, vocab_size: int, device: PlanDevice
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self.device = device
        self._launches = Launches(kernels, device, vocab_size)
        self._max_batch = max_batch
        self._uploads = Uploads(device)
        self._results = Results(device)
        self.downloads = Downloads(device)
        # Made when a call first wants it: greedy and retrieved drafts never do.
        self._kept: int | None = None

    def upload(self, arrays: Mapping[str, HostArray]) -> dict[str, DeviceTensor]:
        """Enqueue a copy of arrays in one piece; they stay on the device until the next wait."""
        return self._uploads.put(arrays)

    def run(
        self,
        stage: Stage,
        feeds: Mapping[str, HostArray | DeviceTensor],
        *,
        slot: int,
        num_rows: int,
    ) -> dict[str, DeviceTensor]:
        """Run one stage; its outputs stay on the device until the next wait.

        Args:
            stage: of a round.
            feeds: host arrays, contiguous, and device tensors by input name; all but the kept rows.
            slot: of row 0.
            num_rows: B.

        Raises:
            EngineError: the device refuses, in its own words.
        """
        arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        tensors = {name: value for name, value in feeds.items() if isinstance(value, DeviceTensor)}
        if arrays:
            tensors |= self._uploads.put(arrays)
        positions = tensors[names.COUNTED[stage]].shape[1]
        sizes = {
            name: names.output_size(
                name, num_rows=num_rows, positions=positions, vocab_size=self.vocab_size
            )
            for name in names.OUTPUTS[stage]
        }
        found = self._results.make(sizes)
        if names.SETTINGS in tensors:
            tensors[names.KEPT_ROWS] = self._kept_rows(slot, num_rows)
        self._launches.run(stage, tensors | found)
        return found

    def close(self) -> None:
        """Unload the kernels and free the device's memory; the device itself is the caller's."""
        self.device.wait()
        self._uploads.free()
        self._results.free()
        self.downloads.free()
        if self._kept is not None:
            self.device.free(self._kept)
            self._kept = None
        self._launches.close()

    def _kept_rows(self, slot: int, num_rows: int) -> DeviceTensor:
        """Return the kept probabilities of slots ``slot ...``, [B, 1, D, V] float32."""
        slot_bytes = _FLOAT32.itemsize * self.depth * self.vocab_size
        if self._kept is None:
            self._kept = self.device.allocate(self._max_batch * slot_bytes)
        shape = (num_rows, 1, self.depth, self.vocab_size)
        return DeviceTensor(self._kept + slot * slot_bytes, shape, _FLOAT32)
