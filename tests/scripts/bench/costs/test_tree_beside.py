"""The benchmark of one tree request beside chains: everybody's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.runtime.offline.rig import RigOptions, open_rig

from scripts.bench.costs import tree_beside
from scripts.bench.costs.tree_beside import BOTH, CHAINS, TREE, Load, measure, run

LOAD = Load(
    chains=((3, 4, 5), (6, 7), (8, 9, 10)),
    tree=(11, 12),
    max_tokens=6,
    tree_tokens=8,
    gamma=2,
    temperature=1.0,
)


def test_chains_and_tree_have_the_same_tokens_alone_and_together(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(tiny_bundle, RigOptions(max_batch=4))
    seconds, digest = measure(rig, LOAD, 1)
    assert {way: len(found) for way, found in seconds.items()} == {CHAINS: 1, TREE: 1, BOTH: 1}
    tokens, _ = run(rig, LOAD, BOTH)
    assert [len(one) for one in tokens] == [6, 6, 6, 8] and len(digest) == 16
    # One that is another beside others is told.
    wrong = {BOTH: [*tokens[:-1], tokens[-1][::-1]], CHAINS: tokens[:-1], TREE: tokens[-1:]}
    monkeypatch.setattr(tree_beside, "run", lambda rig, load, way: (wrong[way], 1.0))
    with pytest.raises(RuntimeError, match="who is beside"):
        measure(rig, LOAD, 1)
    rig.close()
