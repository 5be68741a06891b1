"""TensorRT plans of a bundle: their profiles, their entries in the manifest, and which one fits.

A profile is a box of shapes (rows, tokens of a span, wanted logits) that a plan was built for. The
capacity of the cache is no axis of it: TensorRT takes one capacity per plan. Knows no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta
from outrider.engines.base import EngineError
from outrider.engines.bundle.fields import Text
from outrider.engines.bundle.limits import MOST_TOKENS

PLANS_FOLDER = "plans"
STEP, VERIFY, PREFILL = "step", "verify", "prefill"
# A step feeds one token; after a round whose drafts were all kept the draft model catches up on two.
MAX_STEP_TOKENS = 2
# Where the kernels of a profile are tuned when the caller names nothing else.
DEFAULT_OPT_BATCH = 8
DEFAULT_OPT_CHUNK = 128
# TensorRT wants the address of every tensor, so of every slot's row, at a multiple of 256 bytes.
CAPACITY_BLOCK = 128


Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class Range(NamedTuple):
    """Least, tuned and greatest size of an axis."""

    least: Tokens
    tuned: Tokens
    most: Tokens


class Machine(NamedTuple):
    """The library and the GPU that plans run on; fields as in ``PlanEntry``."""

    flavour: str
    version: str
    compute_capability: str


class Shape(NamedTuple):
    """Shape of one call: B rows, T tokens a row, R logits a row."""

    batch: int
    tokens: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Shapes that a plan runs; the order of profiles is that of the plan's profile indices.

    Attributes:
        batch: rows.
        tokens: of a span or a source; of a path that is kept, what moves.
        wanted: logits of a row.
    """

    name: Text
    batch: Range
    tokens: Range
    wanted: Range

    def axes(self) -> dict[str, Range]:
        """Allowed sizes by the axis names of the graphs."""
        return {
            "batch": self.batch,
            "tokens": self.tokens,
            "kept": self.tokens,
            "length": self.tokens,
            "wanted": self.wanted,
        }

    def broken_limits(self, shape: Shape) -> list[str]:
        """Every axis of a shape that lies outside, in words; empty where the profile fits."""
        axes = [
            ("batch", shape.batch, self.batch),
            ("tokens", shape.tokens, self.tokens),
            ("logits", shape.wanted, self.wanted),
        ]
        return [
            f"{axis} {size} is outside {allowed.least}..{allowed.most}"
            for axis, size, allowed in axes
            if not allowed.least <= size <= allowed.most
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One plan as the manifest declares it.

    Attributes:
        path: file inside the bundle, POSIX; its hash is in ``Manifest.files``.
        part: what it runs: "target", "draft", one of their graphs for trees or sources ("target/tree.onnx",
            "target/encode.onnx").
        flavour: "tensorrt" or "rtx".
        version: of the library that built it; another one does not load it.
        compute_capability: of the GPUs it runs on, for example "8.0".
        precision: type of weights, caches and matrix products; "float8" has weights of 8 bits and
            the rest in float16.
        capacity: S of every cache tensor that it writes.
        profiles: in the order of the plan's profile indices.
    """

    path: Text
    part: Text
    flavour: Text
    version: Text
    compute_capability: Text
    precision: Text
    capacity: Tokens
    profiles: Annotated[tuple[Profile, ...], Meta(min_length=1)]


def is_of_model(part: str) -> bool:
    """Return whether a plan's part is a model or one of its graphs; older bundles had plans of the sampler too."""
    return part.partition("/")[0] in ("target", "draft")


def derive_profiles(
    *,
    max_batch: int,
    max_extend: int,
    max_gamma: int,
    gamma: int,
    opt_batch: int = DEFAULT_OPT_BATCH,
) -> tuple[Profile, ...]:
    """Profiles of a model's plan from the limits of its bundle, narrowest first.

    Args:
        max_batch: slots at most.
        max_extend: tokens of a prefill chunk at most.
        max_gamma: draft tokens per step at most; 0 leaves the verify profile away.
        gamma: draft tokens per step to tune for; cut to ``max_gamma``.
        opt_batch: rows to tune for; cut to ``max_batch``.
    """
    rows = Range(1, min(opt_batch, max_batch), max_batch)
    step = Range(1, 1, MAX_STEP_TOKENS)
    profiles = [Profile(name=STEP, batch=rows, tokens=step, wanted=step)]
    if max_gamma >= 1:
        tuned, most = min(gamma, max_gamma) + 1, max_gamma + 1
        profiles.append(
            Profile(
                name=VERIFY,
                batch=rows,
                tokens=Range(2, max(2, tuned), most),
                wanted=Range(1, max(2, tuned), most),
            )
        )
    profiles.append(
        Profile(
            name=PREFILL,
            # A long chunk pads nobody; the runtime prefills as many rows per call as this says.
            batch=Range(1, 1, 1),
            tokens=Range(1, min(DEFAULT_OPT_CHUNK, max_extend), max_extend),
            wanted=Range(1, 1, max_extend),
        )
    )
    return tuple(profiles)


def plan_capacities(sizes: Sequence[int]) -> tuple[int, ...]:
    """Capacities of plans for caches of these sizes: whole blocks, so that every slot is aligned."""
    return tuple(sorted({-(-size // CAPACITY_BLOCK) * CAPACITY_BLOCK for size in sizes}))


def source_capacity(max_source: int) -> int:
    """Tokens of a source that every slot has room for on a device, whatever is read: the longest, in whole blocks."""
    return plan_capacities([max_source])[0]


def profile_for(profiles: Sequence[Profile], shape: Shape) -> int:
    """Index of the first profile that holds a shape.

    Raises:
        EngineError: none does; names every profile with the limits that the shape breaks.
    """
    for index, profile in enumerate(profiles):
        if not profile.broken_limits(shape):
            return index
    reasons = "; ".join(
        f"profile {profile.name}: {', '.join(profile.broken_limits(shape))}" for profile in profiles
    )
    raise EngineError(f"no plan profile fits: {reasons}")


def why_unfit(plan: PlanEntry, machine: Machine) -> str:
    """Say why a plan does not run with a library on a GPU; empty where it does."""
    for name, declared, found in (
        ("flavour", plan.flavour, machine.flavour),
        ("version", plan.version, machine.version),
        ("compute capability", plan.compute_capability, machine.compute_capability),
    ):
        if declared != found:
            return f"{plan.path}: built for {name} {declared}, this machine has {found}"
    return ""


def rows_of_longest(profiles: Sequence[Profile]) -> int:
    """Return how many rows of the longest spans some profile runs together."""
    longest = max(profile.tokens.most for profile in profiles)
    return max(profile.batch.most for profile in profiles if profile.tokens.most == longest)
