"""Prompts that a tiny target answers, and its bundle opened as a rig."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.runtime.offline.prompts import Prompts, encode_prompts
from outrider.runtime.offline.rig import Rig, RigOptions, open_rig

MAX_TOKENS = 24
TEXTS = tuple(f"once {word} a fox {number}" for number in range(11) for word in ("the", "house"))


@pytest.fixture(scope="package")
def rig(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    costs = tmp_path_factory.mktemp("costs")
    options = RigOptions(max_batch=4, knows_costs=True, costs_folder=costs)
    opened = open_rig(tiny_bundle, options)
    yield opened
    opened.close()


@pytest.fixture(scope="package")
def prompts(rig: Rig) -> Prompts:
    manifest = rig.bundle.manifest
    return encode_prompts(TEXTS, rig.tokenizer, max_tokens=MAX_TOKENS, manifest=manifest)
