"""A target, its draft and their sampler, opened to serve together.

Where the engines' device is an accelerator, the sampler's graphs run on it too, over the same stream,
and whole rounds stay there. On the CPU the host is the device, and its own sampler is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.engine import PlanEngine
from outrider.engines.accelerators.device.pair_rounds import DeviceRounds
from outrider.engines.accelerators.device.sampling.mixed import MixedSampler
from outrider.engines.accelerators.device.sampling.sampler import GraphSampler
from outrider.engines.accelerators.device.sampling.tensors import SAMPLER_FOLDER
from outrider.engines.base import Engine, EngineError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import ModelEntry
from outrider.engines.rounds import Rounds
from outrider.engines.sampling.base import Sampler
from outrider.engines.sampling.cpu_sampler import CpuSampler

AUTO, HOST, DEVICE = "auto", "host", "device"
PLACES = (AUTO, HOST, DEVICE)
# Keys and values are float32 on the host.
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Engines and sampler that a worker runs on; the opener closes them.

    Attributes:
        target: of the bundle.
        draft: of the bundle, if it has one.
        sampler: of both.
        rounds: over all three, where they share a device.
        place: where rounds are sampled and why, in words.
        memory: the device that they share, and its counters.
    """

    target: Engine
    draft: Engine | None
    sampler: Sampler
    rounds: Rounds | None
    place: str
    memory: PlanDevice | None = None
    _opened: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Free engines, sampler and device."""
        self._opened.close()


def open_on_host(
    target: Engine, draft: Engine | None, bundle: Bundle, max_batch: int, reason: str
) -> Pair:
    """Engines whose logits the host reads, and the host's sampler."""
    opened = ExitStack()
    for engine in (target, draft):
        if engine is not None:
            opened.callback(engine.close)
    return Pair(
        target=target,
        draft=draft,
        sampler=_host_sampler(bundle, max_batch),
        rounds=None,
        place=f"on the host: {reason}",
        _opened=opened,
    )


def open_together(
    bundle: Bundle,
    memory: PlanDevice,
    open_model: Callable[[ModelEntry, str], PlanEngine],
    open_sampler: Callable[[], GraphSampler],
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
            sampler=MixedSampler(sampler, _host_sampler(bundle, max_batch)),
            rounds=DeviceRounds(target, draft, sampler),
            place=f"on the device: {reason}",
            memory=memory,
            _opened=undo.pop_all(),
        )


def _host_sampler(bundle: Bundle, max_batch: int) -> CpuSampler:
    manifest = bundle.manifest
    return CpuSampler(
        max_batch=max_batch,
        max_gamma=manifest.max_gamma,
        vocab_size=manifest.target.vocab_size,
    )


def source_memory(bundle: Bundle, max_batch: int) -> str:
    """Say what sources cost the host's memory; empty where no model reads any.

    Args:
        bundle: whose models will serve.
        max_batch: slots that will be opened.
    """
    parts, most_bytes = [], 0
    for model in (bundle.manifest.target, bundle.manifest.draft):
        if model is not None and (source := model.source) is not None:
            token_bytes = 2 * _FLOAT_BYTES * model.num_layers * source.num_heads * source.head_size
            # What the encoder answers is kept for the draft.
            token_bytes += _FLOAT_BYTES * source.hidden_size if source.shares_encoder else 0
            parts.append(f"{token_bytes / 2**10:.1f} KiB of {model.path}")
            most_bytes += token_bytes * max_batch * source.max_source
    if not parts:
        return ""
    each = " and ".join(parts)
    return (
        f"a token of a source takes {each} in a slot, {max_batch} slots of the longest sources "
        f"{most_bytes / 2**20:.0f} MiB"
    )


def why_no_graphs(bundle: Bundle) -> str:
    """Say why a bundle's rounds cannot be sampled on a device; empty where they can."""
    if (bundle.root / SAMPLER_FOLDER).is_dir():
        return ""
    return f"the bundle has no {SAMPLER_FOLDER}/; export it again"


def choose_place(wanted: str, *, is_accelerator: bool, missing: str) -> tuple[str, str]:
    """Choose where rounds are sampled, and say why.

    Args:
        wanted: one of ``PLACES``.
        is_accelerator: whether the engines' device is not the host.
        missing: why the device cannot sample; empty where it can.

    Raises:
        EngineError: the device was asked for and cannot, or there is no such place.
    """
    if wanted not in PLACES:
        raise EngineError(f"sampler {wanted!r}: must be {', '.join(PLACES)}")
    if wanted == HOST:
        return HOST, "asked for"
    if wanted == DEVICE:
        if missing:
            raise EngineError(f"sampler {DEVICE}: {missing}")
        return DEVICE, "asked for"
    if not is_accelerator:
        return HOST, "it is the device, and its own sampler is faster"
    return (HOST, missing) if missing else (DEVICE, "an accelerator")
