"""Trees over plans: a plan of ``tree.onnx`` verifies them, one of ``keep_path.onnx`` keeps a path.

Both run over the caches that the engine's other plans run over. Keeping a path is one run on the device
that nobody waits for: cached rows are gathered from the path's columns and written behind the text, as
``engines.onnx.trees`` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.kv_cache import PlanCache
from outrider.engines.accelerators.device.plan import LoadedPlan
from outrider.engines.accelerators.device.transfers import HostArray, InputPlace, Uploads
from outrider.engines.base import BundleError, Span
from outrider.engines.bundle.names import ANCESTORS, COLUMNS, POSITIONS, START
from outrider.engines.bundle.plans import Shape, profile_for
from outrider.engines.spans import check_kept_path
from outrider.engines.tree_inputs import TreeInputs


class PlanTrees:
    """Plans and memory with which an engine over plans takes trees.

    Plans verify or keep, one of each per capacity; ``last_position`` is the greatest the model knows.

    Raises:
        BundleError: a plan that verifies has none that keeps.
    """

    def __init__(
        self,
        verify: Sequence[LoadedPlan],
        keep: Sequence[LoadedPlan],
        device: PlanDevice,
        *,
        last_position: int,
    ) -> None:
        self._verify = {plan.entry.capacity: plan for plan in verify}
        self._keep = {plan.entry.capacity: plan for plan in keep}
        if missing := sorted(self._verify.keys() - self._keep.keys()):
            raise BundleError(f"no plan keeps a path in a cache of {missing[0]} tokens")
        self._last_position = last_position
        self._uploads = Uploads(device)
        self._inputs = InputPlace(device)
        # By slot, what was verified last and kept by nobody yet.
        self._spans: dict[int, Span] = {}

    def check_capacities(self, capacities: Sequence[int]) -> None:
        """Refuse caches in which no tree can be verified.

        Raises:
            BundleError: naming the capacity.
        """
        for capacity in capacities:
            if capacity not in self._verify:
                raise BundleError(f"no plan takes trees in a cache of {capacity} tokens")

    def plan(self, capacity: int) -> LoadedPlan:
        """Return the plan that verifies trees in a cache of a capacity that was checked."""
        return self._verify[capacity]

    def feeds(self, spans: Sequence[Span], shape: Shape) -> Mapping[str, HostArray]:
        """Arrays of a call beside those of every graph; spans without parents are chains."""
        inputs = TreeInputs.empty(len(spans), shape.tokens)
        for row, span in enumerate(spans):
            inputs.fill_row(row, span, self._last_position)
        return {POSITIONS: inputs.positions, ANCESTORS: inputs.ancestors}

    def note(self, spans: Sequence[Span]) -> None:
        """These spans are the last of their slots."""
        for span in spans:
            self.forget(span.slot)
            if span.parents is not None:
                self._spans[span.slot] = span

    def forget(self, slot: int | None = None) -> None:
        """A slot, or every one, has no tree any more."""
        if slot is None:
            self._spans.clear()
        else:
            self._spans.pop(slot, None)

    def keep_path(self, cache: PlanCache, slot: int, path: Sequence[int]) -> None:
        """Enqueue the move of a path's cached tokens into place; see ``Engine.keep_path``.

        Raises:
            EngineError: there is no such path (nothing changed), or the library refuses (the slot is
                undefined).
        """
        tree = check_kept_path(path, slot, self._spans.get(slot))
        del self._spans[slot]
        num_fixed = sum(node == place for place, node in enumerate(path))
        cache.lengths[slot] = 0
        if columns := [tree.start + node for node in path[num_fixed:]]:
            self._move(cache, slot, tree.start + num_fixed, columns)
        cache.lengths[slot] = tree.start + len(path)

    def close(self) -> None:
        """Free plans and memory; nothing may be under way."""
        for plan in (*self._verify.values(), *self._keep.values()):
            plan.close()
        self._uploads.free()
        self._inputs.free()

    def _move(self, cache: PlanCache, slot: int, start: int, columns: Sequence[int]) -> None:
        plan = self._keep[cache.capacity]
        arrays = {
            START: np.array([start], dtype=np.int64),
            COLUMNS: np.array(columns, dtype=np.int64),
        }
        feeds = self._inputs.take(self._uploads.put(arrays))
        addresses = {name: tensor.pointer for name, tensor in feeds.items()}
        addresses |= cache.addresses(slot)
        shape = Shape(1, len(columns), 1)
        plan.run(profile_for(plan.entry.profiles, shape), shape, addresses)


def has_tree(spans: Sequence[Span]) -> bool:
    """Say whether a call of these spans needs a plan that takes trees."""
    return any(span.parents is not None for span in spans)
