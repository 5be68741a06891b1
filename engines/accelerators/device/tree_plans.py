"""Plans that verify trees and keep their paths: their names and shapes.

Pure; what a plan is, ``engines.bundle.plans`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.engines.bundle.manifest import Manifest, ModelEntry
from outrider.engines.bundle.names import KEEP_PATH_FILE, TREE_FILE
from outrider.engines.bundle.plans import DEFAULT_OPT_BATCH, PlanEntry, Profile, Range

TREE, KEEP = "tree", "keep"
# Where the kernels are tuned: tokens of a tree, and tokens of a path that have to be moved.
DEFAULT_OPT_NODES = 16
DEFAULT_OPT_KEPT = 4


def tree_part(part: str) -> str:
    """Part of the plan that verifies trees with a model's part, "target" or "draft"."""
    return f"{part}/{TREE_FILE}"


def keep_part(part: str) -> str:
    """Part of the plan that keeps the paths of a model's trees."""
    return f"{part}/{KEEP_PATH_FILE}"


def tree_profile(
    manifest: Manifest, model: ModelEntry, *, opt_batch: int = DEFAULT_OPT_BATCH
) -> Profile:
    """The one profile of a plan that verifies trees, from the limits of its bundle, which cut ``opt_batch``."""
    most = model.max_tree_nodes
    tuned = min(DEFAULT_OPT_NODES, most)
    return Profile(
        name=TREE,
        batch=Range(1, min(opt_batch, manifest.max_batch), manifest.max_batch),
        tokens=Range(2, tuned, most),
        # One logit of one row alone would take another kernel on the host.
        wanted=Range(2, tuned, most),
    )


def keep_profile(model: ModelEntry) -> Profile:
    """The one profile of a plan that keeps a path: its tokens are those that must be moved."""
    most = model.max_tree_nodes - 1
    return Profile(
        name=KEEP,
        batch=Range(1, 1, 1),
        tokens=Range(1, min(DEFAULT_OPT_KEPT, most), most),
        wanted=Range(1, 1, 1),
    )


def tree_entries(
    plans: Sequence[PlanEntry], part: str, chain: PlanEntry
) -> tuple[PlanEntry, PlanEntry] | None:
    """Return the plans that verify trees and keep their paths beside a plan of a part; None where one is missing."""
    wanted = [
        replace(chain, part=name, path="", profiles=())
        for name in (tree_part(part), keep_part(part))
    ]
    found = {replace(plan, path="", profiles=()): plan for plan in plans}
    verify, keep = (found.get(one) for one in wanted)
    return None if verify is None or keep is None else (verify, keep)
