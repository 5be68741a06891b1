"""Plans of the sampler's graphs: which there must be, and the shapes they are built for.

Pure; what a plan is, ``engines.bundle.plans`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from outrider.engines.accelerators.device.base import DeviceTensor
from outrider.engines.accelerators.device.sampling.lists import LIST_LIMITS, padded_length
from outrider.engines.accelerators.device.sampling.tensors import COUNTED, LISTS, LOGITS
from outrider.engines.base import EngineError
from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.names import SAMPLER_FOLDER
from outrider.engines.bundle.plans import DEFAULT_OPT_BATCH, PlanEntry, Profile, Range, Shape

SAMPLE = "sample"
# Samplers have one precision; the column of a plan's entry says so.
SAMPLER_PRECISION = "float32"


def sampler_parts(manifest: Manifest) -> tuple[str, ...]:
    """File names of a bundle's sampler graphs; each is the part of a plan."""
    paths = (PurePosixPath(name) for name in manifest.files)
    return tuple(sorted(path.name for path in paths if path.parent.name == SAMPLER_FOLDER))


def sampler_profile(
    manifest: Manifest, *, gamma: int, opt_batch: int = DEFAULT_OPT_BATCH
) -> Profile:
    """The one profile of a sampler graph, from the limits of its bundle, to which all sizes are cut."""
    most = manifest.max_gamma + 1
    tuned = min(gamma, manifest.max_gamma) + 1
    vocab_size = manifest.target.vocab_size
    seen = padded_length(min(vocab_size, manifest.max_context))
    lengths = {"num_seen": seen} | {
        axis: min(length, padded_length(vocab_size)) if axis == "num_allowed" else length
        for axis, length in LIST_LIMITS.items()
    }
    return Profile(
        name=SAMPLE,
        batch=Range(1, min(opt_batch, manifest.max_batch), manifest.max_batch),
        tokens=Range(1, tuned, most),
        # Proposals read the first column; an engine may give as many as a verification has.
        wanted=Range(1, 1, most),
        # Most requests have no lists.
        lists={axis: Range(1, 1, length) for axis, length in sorted(lengths.items())},
    )


def sampler_axes(tensors: Mapping[str, DeviceTensor]) -> tuple[Shape, dict[str, int]]:
    """Shape of a call of a sampler graph, and the lengths of its lists by axis."""
    positions = next(tensors[name] for name in COUNTED if name in tensors).shape
    wanted = tensors[LOGITS].shape[1] if LOGITS in tensors else 1
    lists = {
        axis: tensors[name].shape[place]
        for name, axes in LISTS.items()
        if name in tensors
        for place, axis in enumerate(axes, start=1)
    }
    return Shape(positions[0], positions[1], wanted), lists


def check_call(entry: PlanEntry, tensors: Mapping[str, DeviceTensor]) -> None:
    """Refuse a call that a sampler's plan was not built for, before anything is enqueued.

    Raises:
        EngineError: naming the plan's profile and every limit that the call breaks.
    """
    shape, lists = sampler_axes(tensors)
    (profile,) = entry.profiles
    if broken := profile.broken_limits(shape, lists):
        raise EngineError(f"{entry.part}: profile {profile.name}: {', '.join(broken)}")
