"""The tree graphs of one model on ONNX Runtime: beside the engine, over the same cache.

``tree.onnx`` answers trees; chains in a batch of its own, where rows are not packed, get the mask of
a chain, which gives them the bits that ``model.onnx`` would. ``keep_path.onnx`` moves the
cache rows of an accepted path into place, on the device.

Columns of a slot around ``keep_path``, for a tree of 5 tokens of which 0, 2 and 4 are kept:

    [0 ... start) text   [0 1 2 3 4) tree            before
    [0 ... start) text   [0 2 4) path  [3 4) unread  after
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.bundle.names import ANCESTORS, COLUMNS, POSITIONS, START, TREE_FILE
from outrider.engines.kv_cache import KvCache
from outrider.engines.onnx.session import LIBRARY_ERRORS, bind_caches, check_graph, open_session
from outrider.engines.tree_inputs import TreeInputs


class TreeGraphs:
    """Sessions over the tree graphs of one model.

    Raises:
        BundleError: a graph does not fit its entry.
        EngineError: the library cannot load it.
    """

    def __init__(self, bundle: Bundle, entry: ModelEntry, *, num_threads: int) -> None:
        self.session = open_session(bundle.tree_path(entry), num_threads=num_threads)
        check_graph(self.session, entry, file=TREE_FILE, extra_inputs={POSITIONS, ANCESTORS})
        self._keeper = open_session(bundle.keep_path_path(entry), num_threads=num_threads)
        self._num_layers = entry.num_layers

    def bind(self, binding: onnxruntime.IOBinding, num_rows: int, num_tokens: int) -> TreeInputs:
        """Bind arrays for the tree's inputs to a call; they are filled before each run."""
        inputs = TreeInputs.empty(num_rows, num_tokens)
        for name, array in ((POSITIONS, inputs.positions), (ANCESTORS, inputs.ancestors)):
            pointer = array.ctypes.data
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, pointer)
        return inputs

    def keep_path(self, cache: KvCache, slot: int, start: int, path: Sequence[int]) -> None:
        """Move the rows ``start + path`` of a slot to ``start`` and on; ``path`` ascends.

        Raises:
            EngineError: ONNX Runtime failed; the slot is undefined.
        """
        num_fixed = sum(node == place for place, node in enumerate(path))
        columns = start + np.array(path[num_fixed:], dtype=np.int64)
        if columns.size == 0:
            return
        binding = self._keeper.io_binding()
        destination = np.array([start + num_fixed], dtype=np.int64)
        for name, array in ((START, destination), (COLUMNS, columns)):
            binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        bind_caches(binding, cache, self._num_layers, slot=slot, num_rows=1)
        try:
            self._keeper.run_with_iobinding(binding)
        except LIBRARY_ERRORS as error:
            raise EngineError(f"ONNX Runtime failed: {error}") from error
