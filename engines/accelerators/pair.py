"""A target, its draft and their sampler over one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.pair_rounds import DeviceRounds
from outrider.engines.accelerators.device.sampling.mixed import MixedSampler
from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.backends import Which
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.pair import Pair, host_sampler


def open_together(
    bundle: Bundle,
    memory: PlanDevice,
    open_model: Callable[[ModelEntry, Which], PlanEngine],
    open_sampler: Callable[[], DeviceSampler],
    *,
    max_batch: int,
    reason: str,
) -> Pair:
    """Engines and sampler over one device, which is closed with the pair, or if one of them cannot be opened.

    Raises:
        BundleError: a graph or a plan does not fit the manifest.
        EngineError: the library cannot load it.
    """
    manifest, draft = bundle.manifest, None
    with ExitStack() as undo:
        undo.callback(memory.close)
        target = open_model(manifest.target, "target")
        undo.callback(target.close)
        if manifest.draft is not None:
            draft = open_model(manifest.draft, "draft")
            undo.callback(draft.close)
        sampler = open_sampler()
        undo.callback(sampler.close)
        return Pair(
            target=target,
            draft=draft,
            sampler=MixedSampler(sampler, host_sampler(bundle, max_batch)),
            rounds=DeviceRounds(target, draft, sampler, memory),
            place=f"on the device: {reason}",
            opened=undo.pop_all(),
        )
