"""A target, its draft and their sampler, opened to serve together.

Where the engines' device is an accelerator, rounds are sampled on it too, over the same stream, and stay there. On the
CPU the host is the device, and its own sampler is faster.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from outrider.engines.base import Engine, EngineError
from outrider.engines.bundle.bundle import Bundle
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
        opened: closes all of them.
    """

    target: Engine
    draft: Engine | None
    sampler: Sampler
    rounds: Rounds | None
    place: str
    opened: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Free engines, sampler and device."""
        self.opened.close()


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
        sampler=host_sampler(bundle, max_batch),
        rounds=None,
        place=f"on the host: {reason}",
        opened=opened,
    )


def host_sampler(bundle: Bundle, max_batch: int) -> CpuSampler:
    """Return the host's sampler of a bundle's rows."""
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
