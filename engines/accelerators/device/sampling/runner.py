"""Runs the sampler's graphs, whatever library they are loaded in, and owns all of their memory.

Inputs of the host are uploaded in one piece per call, outputs are written to memory of the device,
and nothing waits but ``downloads``. Probabilities of sampled drafts stay, one row of memory per slot:

    kept[slot]    [position 0 | position 1 | ... | position max_gamma - 1 | nobody reads this]

so that the slots of a call, which follow one another, are one piece of memory, read and written in
place. Everything else is free again after the next wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import numpy as np
from outrider.engines.accelerators.device.base import ALIGNMENT, DeviceTensor, PlanDevice, Rows
from outrider.engines.accelerators.device.results import Results
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.transfers import Downloads, HostArray, Uploads

_FLOAT32 = np.dtype(np.float32)


class SamplerGraph(Protocol):
    """One graph, loaded."""

    @property
    def inputs(self) -> Set[str]:
        """Names of what it reads."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Names of what it writes."""
        ...

    def run(self, tensors: Mapping[str, DeviceTensor]) -> None:
        """Enqueue it over its inputs and outputs, by name.

        Raises:
            EngineError: the library refuses, in its own words.
        """
        ...

    def close(self) -> None:
        """Free what it holds on the device."""
        ...


class SamplerRunner:
    """The graphs of a sampler over one device.

    It keeps probabilities for ``depth`` positions of each slot.
    """

    def __init__(
        self,
        open_graph: Callable[[str], SamplerGraph],
        *,
        max_batch: int,
        depth: int,
        vocab_size: int,
        device: PlanDevice,
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self.device = device
        self._open_graph = open_graph
        self._max_batch = max_batch
        self._uploads = Uploads(device)
        self._results = Results(device)
        self.downloads = Downloads(device)
        self._graphs: dict[str, SamplerGraph] = {}
        # Made when a graph first wants it: greedy and retrieved drafts never do.
        self._kept: int | None = None

    def upload(self, arrays: Mapping[str, HostArray]) -> dict[str, DeviceTensor]:
        """Enqueue a copy of arrays in one piece; they stay on the device until the next wait."""
        return self._uploads.put(arrays)

    def run(
        self,
        file: str,
        feeds: Mapping[str, HostArray | DeviceTensor],
        *,
        slot: int,
        num_rows: int,
    ) -> dict[str, DeviceTensor]:
        """Run one graph; its outputs stay on the device until the next wait.

        Args:
            file: name of the graph.
            feeds: host arrays, contiguous, and device tensors by input name; all but the kept rows.
            slot: of row 0.
            num_rows: B.

        Raises:
            EngineError: the graph cannot be loaded, or failed.
        """
        if file not in self._graphs:
            self._graphs[file] = self._open_graph(file)
        graph = self._graphs[file]
        arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        tensors = {name: value for name, value in feeds.items() if isinstance(value, DeviceTensor)}
        if arrays:
            tensors |= self._uploads.put(arrays)
        positions = next(tensors[name] for name in names.COUNTED if name in tensors).shape[1]
        sizes = {
            name: names.output_size(
                name, num_rows=num_rows, positions=positions, vocab_size=self.vocab_size
            )
            for name in graph.outputs
            if name != names.NEW_KEPT_ROWS
        }
        found = self._results.make(sizes)
        if names.KEPT_ROWS not in graph.inputs:
            graph.run(tensors | found)
            return found
        kept = self._kept_rows(slot, num_rows)
        lent = self._aligned(kept)
        tensors[names.KEPT_ROWS] = lent
        if names.NEW_KEPT_ROWS in graph.outputs:
            graph.run(tensors | found | {names.NEW_KEPT_ROWS: lent})
            if lent is not kept:
                self._copy(lent, kept)
        else:
            graph.run(tensors | found)
        return found

    def close(self) -> None:
        """Free the device's memory; the device itself is the caller's."""
        self.device.wait()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._uploads.free()
        self._results.free()
        self.downloads.free()
        if self._kept is not None:
            self.device.free(self._kept)
            self._kept = None

    def _kept_rows(self, slot: int, num_rows: int) -> DeviceTensor:
        """Return the kept probabilities of slots ``slot ...``, [B, 1, D, V] float32."""
        slot_bytes = _FLOAT32.itemsize * self.depth * self.vocab_size
        if self._kept is None:
            self._kept = self.device.allocate(self._max_batch * slot_bytes)
        shape = (num_rows, 1, self.depth, self.vocab_size)
        return DeviceTensor(self._kept + slot * slot_bytes, shape, _FLOAT32)

    def _aligned(self, kept: DeviceTensor) -> DeviceTensor:
        """The rows where a graph may bind them: in place, or as a copy at an aligned address."""
        if kept.pointer % ALIGNMENT == 0:
            return kept
        lent = self._results.make({names.KEPT_ROWS: (kept.shape, kept.dtype)})[names.KEPT_ROWS]
        self._copy(kept, lent)
        return lent

    def _copy(self, source: DeviceTensor, destination: DeviceTensor) -> None:
        size = source.num_bytes
        places = (Rows(destination.pointer, size), Rows(source.pointer, size))
        self.device.copy_rows(*places, width=size, rows=1)
