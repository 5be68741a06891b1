"""Every family exports without a line of its own, and answers as PyTorch does."""

from pathlib import Path

import pytest

from export.checkpoint import model_facts
from export.parity import check_parity
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
    derive_tree_graphs(path)
    trees = check_tree_parity(model, path, model_facts(model.config), max_tree_nodes=40)
    assert trees["tree_masks"]["num_greedy_equal"] == trees["tree_masks"]["num_compared"] == 3 * 40
    if family == "gpt2":  # the one whose projections are Gemm nodes
        assert quantize_file(path, "int8") == 2 * 4 + 1
        check_parity(model, path, model_facts(model.config), max_gamma=4, tolerance=0.5)
    assert model.config._attn_implementation != "outrider_kv"
