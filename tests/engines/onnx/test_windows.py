"""Models with a sliding window, and with sinks, behind the engine's contract: its texts are longer than the window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import Engine
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.determinism import has_equal_bits
from outrider.engines.opening import open_engine
from outrider.engines.reference.torch_engine import open_checkpoint
from outrider.export.pipeline import ExportOptions, export_bundle

from scripts.check_parity import random_model
from tests.addons import needs_accelerators
from tests.conftest import VOCAB_SIZE, write_tokenizer
from tests.engines.contract import MakeEngine, extend_one, make_tokens, span, wanted_logits
from tests.engines.tree_contract import TreeContract

WINDOW, CONTEXT = 5, 64


@pytest.fixture(
    scope="module", params=["gemma3_text", "granite_swa", "gemma4_text", "mimo_v2_flash"]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with and without a window; heads of the second family have sinks; the third has caches of two sizes.

    Its last two layers read the caches of the first two. The fourth has sinks, experts, more heads
    where there is a window, and values narrower than keys.
    """
    family = str(request.param)
    folder = tmp_path_factory.mktemp("windowed") / family
    sizes = {"sliding_window": WINDOW, "vocab_size": VOCAB_SIZE}
    if family == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = VOCAB_SIZE
    model = random_model(family, 96, **sizes)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """In float32, and of the family with sinks in int8, whose graph packs no rows."""
    return export_bundle(
        target=checkpoint,
        draft=None,
        out=tmp_path_factory.mktemp("windowed") / "bundle",
        options=ExportOptions(
            weights="int8" if checkpoint.name == "granite_swa" else "float32",
            max_context=CONTEXT,
            max_batch=4,
            max_gamma=4,
            max_tree_nodes=16,
        ),
        progress=lambda stage: None,
    )


class TestWindow(TreeContract):
    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, bundle: Bundle) -> MakeEngine:
        return lambda: open_engine(bundle, "target", max_batch=4, with_trees=True)

    def test_bits_are_equal_in_all_shapes(self, engine: Engine, checkpoint: Path) -> None:
        assert engine.packs_rows == (checkpoint.name == "gemma3_text")
        assert has_equal_bits(engine)

    def test_spans_of_every_width_have_the_bits_of_one(self, engine: Engine) -> None:
        tokens = make_tokens(engine, 40, seed=3)
        expected = extend_one(engine, 0, 0, tokens)
        beside = [span(row, 0, make_tokens(engine, 11 * row, seed=row)) for row in (1, 2, 3)]
        for width in range(1, 18):
            found, start = [], 0
            while start < len(tokens):
                part = span(0, start, tokens[start : start + width])
                others = beside if start == 0 else [span(row, 11 * row) for row in (1, 2, 3)]
                found.append(wanted_logits(engine, [part, *others] if width % 2 else [part])[0])
                start += width
            np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("checkpoint", ["gemma3_text"], indirect=True)
def test_answers_are_those_of_the_checkpoint(bundle: Bundle, checkpoint: Path) -> None:
    sizes = {"max_batch": 2, "max_context": CONTEXT, "max_extend": CONTEXT, "max_tree_nodes": 9}
    engines = [open_engine(bundle, "target", max_batch=2), open_checkpoint(checkpoint, **sizes)]
    tokens = make_tokens(engines[0], CONTEXT, seed=9)
    mine, expected = (extend_one(engine, 0, 0, tokens) for engine in engines)
    np.testing.assert_allclose(mine, expected, rtol=0.0, atol=1e-4)


@needs_accelerators
def test_the_certificate_looks_beyond_the_window(bundle: Bundle, checkpoint: Path) -> None:
    certificate = load_bundle(bundle.root).manifest.certificate["target"]
    part = certificate.get("int8", certificate)
    assert {"window", "tree_window"} <= part.keys()
    others = {name for name in ("grouped", "device") if "window" in part.get(name, {})}
    reason = {
        "granite_swa": "sinks",
        "gemma4_text": "share caches",
        "mimo_v2_flash": "experts",
    }.get(checkpoint.name)
    if reason is None:
        assert others == {"grouped", "device"}
    else:
        assert not others
        assert reason in certificate["no_device"]
        assert not bundle.manifest.target.device_precision
