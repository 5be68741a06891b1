"""Every family exports without a line of its own, and answers as PyTorch does."""

from pathlib import Path

import numpy as np
import pytest

from engines.bundle import GROUPED_FILE
from export.checkpoint import ModelFacts, model_facts
from export.grouped_heads import derive_grouped_graph
from export.parity import GraphRunner, check_parity
from export.quantize import quantize_file
from export.to_onnx import export_model
from export.tree_graph import derive_tree_graphs
from export.tree_parity import check_tree_parity
from scripts.check_parity import FAMILIES, random_model


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_family_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    model = random_model(family, num_positions=96)
    path = tmp_path / "model.onnx"
    export_model(model, path)
    certificate = check_parity(model, path, model_facts(model.config), max_gamma=4)
    assert certificate["rollback"]["num_compared"] > 0
    assert_single_tokens_keep_their_bits(path, model_facts(model.config))
    if derive_grouped_graph(path):
        grouped = path.with_name(GROUPED_FILE)
        check_parity(model, grouped, model_facts(model.config), max_gamma=4)
        assert_single_tokens_keep_their_bits(grouped, model_facts(model.config))
    else:
        assert family in ("gpt2", "gpt_neox", "opt")  # a cache head for every query head
        assert not path.with_name(GROUPED_FILE).exists()
    derive_tree_graphs(path)
    trees = check_tree_parity(model, path, model_facts(model.config), max_tree_nodes=40)
    assert trees["tree_masks"]["num_greedy_equal"] == trees["tree_masks"]["num_compared"] == 3 * 40
    if family == "gpt2":  # the one whose projections are Gemm nodes
        assert quantize_file(path, "int8") == 2 * 4 + 1
        check_parity(model, path, model_facts(model.config), max_gamma=4, tolerance=0.5)
        assert_single_tokens_keep_their_bits(path, model_facts(model.config))
    assert model.config._attn_implementation != "outrider_kv"


def assert_single_tokens_keep_their_bits(path: Path, facts: ModelFacts) -> None:
    """A batch fed token by token, its rows at different places, against the same by spans of four."""
    starts = np.array([0, 3, 8, 5])
    text = np.random.default_rng(5).integers(0, facts.vocab_size, (4, 16))
    wide, narrow = (GraphRunner(path, facts, batch=4, capacity=32) for _ in range(2))
    for runner in (wide, narrow):
        runner.extend(text[:, :8], np.zeros(4, np.int64))
    span = np.stack([row[start : start + 4] for row, start in zip(text, starts, strict=True)])
    expected = wide.extend(span, starts)
    for step in range(4):
        found = narrow.extend(span[:, step : step + 1], starts + step)
        np.testing.assert_array_equal(found[:, 0], expected[:, step])
