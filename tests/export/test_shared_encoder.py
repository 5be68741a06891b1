"""Export of a pair whose draft was made with the target's encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from outrider.engines.base import Source, Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.opening import open_engine, open_pair
from outrider.export.pipeline import ExportOptions, export_bundle
from transformers import T5ForConditionalGeneration

from tests.conftest import write_t5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("shared_encoder")
    for name, seed in (("target", 1), ("draft", 2)):
        write_t5(root / name, num_layers=1, hidden_size=16, seed=seed)
    target, draft = (
        T5ForConditionalGeneration.from_pretrained(root / name) for name in ("target", "draft")
    )
    with torch.no_grad():
        for part in ("shared", "encoder"):
            weights = getattr(target, part).state_dict()
            getattr(draft, part).load_state_dict(weights)
    draft.save_pretrained(root / "draft")
    return export_bundle(
        target=root / "target",
        draft=root / "draft",
        out=root / "bundle",
        options=ExportOptions(max_context=32, max_source=32, max_gamma=1, max_tree_nodes=0),
        progress=lambda stage: None,
    )


def test_the_draft_shares_the_encoder(bundle: Bundle) -> None:
    target, draft = bundle.manifest.target.source, bundle.manifest.draft
    assert target is not None and draft is not None and draft.source is not None
    assert (target.shares_encoder, draft.source.shares_encoder) == (False, True)
    assert bundle.cross_path(draft).stat().st_size < bundle.encode_path(draft).stat().st_size


def test_it_answers_as_with_its_own(bundle: Bundle) -> None:
    sources = [Source(slot=slot, tokens=tuple(range(3, 4 + slot * 9))) for slot in range(3)]
    spans = [Span(slot=slot, start=0, tokens=(0, 5, 6), num_logits=3) for slot in range(3)]
    alone = open_engine(bundle, "draft")
    alone.read(sources)
    expected = alone.extend(spans)
    pair = open_pair(bundle)
    assert pair.draft is not None
    pair.target.read(sources)
    pair.draft.read(sources)
    np.testing.assert_array_equal(pair.draft.extend(spans), expected)
    assert np.abs(pair.target.extend(spans) - expected).max() > 1e-3
    pair.close()
