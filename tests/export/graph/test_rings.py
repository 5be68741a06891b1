"""Graphs over rings answer as the checkpoint does, and a mask that is off by one shows in the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import RingsEntry
from outrider.engines.bundle.names import GROUPED_FILE, RINGS_FILE
from outrider.engines.determinism import has_equal_bits
from outrider.engines.opening import open_engine
from outrider.export.certificate.certify import certify_bundle
from outrider.export.certificate.parity import check_parity
from outrider.export.graph import rings
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.part import Sizes, with_rings
from outrider.export.pipeline import ExportOptions, export_bundle
from transformers import PreTrainedModel

from scripts.check_parity import random_model
from tests.conftest import VOCAB_SIZE, write_tokenizer
from tests.engines.handmade import write_bundle
from tests.export.certificate.bounds import within
from tests.gate import few_of
from tests.mutants import put_in

WINDOW, COLUMNS, MAX_GAMMA = 5, 30, 4
FAMILIES = (
    "gemma2",
    "mistral",
    "phi3",
    "granite_swa",
    "gemma4_text",
    "mimo_v2_flash",
)
# Of layers of other sizes, or that read the caches of others, or that stand beside sinks.
PADDED = {"granite_swa", "gemma4_text", "mimo_v2_flash"}


def exported(family: str, folder: Path) -> tuple[PreTrainedModel, ModelConfig, Path]:
    model = random_model(family, num_positions=128, sliding_window=WINDOW)
    path = folder / "model.onnx"
    export_model(model, path)
    return model, replace(read_model_config(model.config), ring_columns=COLUMNS), path


@pytest.fixture(scope="module")
def gemma(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[PreTrainedModel, ModelConfig, Path]:
    return exported("gemma3_text", tmp_path_factory.mktemp("gemma"))


def check_family(
    family: str, model: PreTrainedModel, model_config: ModelConfig, path: Path
) -> None:
    """Rings of 30 columns: a certificate's texts go beyond the last, and a case of its own goes across it."""
    layers = rings.ring_layers(path)
    assert layers == ((0, 1) if family in {"mistral", "phi3"} else (0,))
    is_grouped = model_config.has_equal_layers and derive_grouped_graph(path, has_rings=True)
    assert is_grouped == (family not in PADDED)
    if not is_grouped:
        rings.derive_ring_graph(path)
    graph = path.with_name(GROUPED_FILE if is_grouped else RINGS_FILE)
    found = check_parity(model, graph, model_config, max_gamma=MAX_GAMMA, bound=within(1e-4))
    assert found["ring"]["num_greedy_equal"] == found["ring"]["num_compared"] == MAX_GAMMA + 2


def test_rings_answer_as_the_checkpoint(gemma: tuple[PreTrainedModel, ModelConfig, Path]) -> None:
    check_family("gemma3_text", *gemma)


@pytest.mark.parametrize("family", few_of(FAMILIES, "granite_swa"))
def test_rings_of_every_family_do(family: str, tmp_path: Path) -> None:
    check_family(family, *exported(family, tmp_path))


def test_layers_without_a_window_keep_no_ring(tmp_path: Path) -> None:
    assert rings.ring_layers(write_bundle(tmp_path / "bundle") / "target" / "model.onnx") == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"window": window,', '"window": window + 1,'),
        ('"window": window,', '"window": window - 1,'),
        (
            'tape.op("Add", [first, size])',
            'tape.op("Sub", [tape.op("Add", [first, size]), known["one"]])',
        ),
    ],
)
def test_a_mask_or_a_place_that_is_off_is_refused(
    gemma: tuple[PreTrainedModel, ModelConfig, Path],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
) -> None:
    model, model_config, path = gemma
    put_in(monkeypatch, rings, old, new)
    assert derive_grouped_graph(path, has_rings=True)
    with pytest.raises(BundleError, match=r"parity case .* differs"):
        check_parity(
            model,
            path.with_name(GROUPED_FILE),
            model_config,
            max_gamma=MAX_GAMMA,
            bound=within(1e-4),
        )


def test_rings_are_taken_where_they_are_half_of_the_context() -> None:
    model_config = read_model_config(random_model("gemma2", 96).config)
    sizes = Sizes(max_context=1152, max_batch=8, max_gamma=8, max_tree_nodes=64)
    wide = replace(model_config, window=16)
    assert with_rings(wide, sizes).ring_columns == 576
    for other in (
        with_rings(wide, replace(sizes, max_context=1151)),
        with_rings(replace(wide, window=58), sizes),
        with_rings(replace(wide, window=None), sizes),
    ):
        assert other.ring_columns == 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3_text", "granite_swa"])
def test_a_bundle_with_rings_is_served(family: str, tmp_path: Path) -> None:
    model = random_model(family, 1300, sliding_window=WINDOW, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "checkpoint")
    bundle = export_bundle(
        target=tmp_path / "checkpoint",
        draft=None,
        out=tmp_path / "bundle",
        options=ExportOptions(max_context=1200, max_batch=4, max_gamma=4),
        progress=lambda stage: None,
    )
    entry = load_bundle(bundle.root).manifest.target
    assert entry.rings == RingsEntry(window=WINDOW, columns=576, layers=(0,))
    assert (entry.max_tree_nodes, bundle.manifest.requires) == (0, ("rings",))
    assert has_equal_bits(open_engine(bundle, "target"))
    found = certify_bundle(bundle, {"target": tmp_path / "checkpoint"})["target"]
    assert "ring" in found["rings" if family in PADDED else "grouped"]
