"""Graphs of tiny encoder-decoder models, exported once for all tests that read them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from outrider.engines.bundle.names import MODEL_FILE
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import ModelConfig, read_model_config
from transformers import PreTrainedModel

from tests.conftest import MakeOnce
from tests.export.text2text_models import random_text2text

NUM_POSITIONS = 200


@dataclass(frozen=True, slots=True)
class Exported:
    """A model and its canonical graph, with all graphs for the CPU beside it."""

    model: PreTrainedModel
    model_config: ModelConfig
    path: Path


@pytest.fixture(scope="session", params=["t5", "bart"])
def text2text(request: pytest.FixtureRequest, made_once: MakeOnce) -> Exported:
    """A random model of a family, which knows sources of 200 tokens; K of its products is a multiple of 32.

    One family biases attention by distance, the other embeds positions.
    """
    family = str(request.param)
    is_t5 = family == "t5"
    sizes = {"d_kv": 16, "num_heads": 4} if is_t5 else {"max_position_embeddings": NUM_POSITIONS}
    model = random_text2text(family, **sizes)

    def export(folder: Path) -> None:
        path = folder / MODEL_FILE
        export_model(model, path, num_positions=NUM_POSITIONS, num_source_positions=NUM_POSITIONS)
        assert derive_grouped_graph(path)
        derive_tree_graphs(path)

    # Every file of tests goes through both families, and pytest keeps one.
    path = made_once(f"text2text-{family}", export) / MODEL_FILE
    model_config = read_model_config(model.config)
    assert model_config.source is not None
    source = replace(model_config.source, max_source=NUM_POSITIONS)
    return Exported(model, replace(model_config, max_position=NUM_POSITIONS, source=source), path)


@pytest.fixture
def own_text2text(text2text: Exported, tmp_path: Path) -> Exported:
    """The same with a copy of its graphs, free to be changed."""
    folder = shutil.copytree(text2text.path.parent, tmp_path / "target")
    return replace(text2text, path=Path(folder) / MODEL_FILE)
