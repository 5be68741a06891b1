"""Every family exports without a line of its own, and answers as PyTorch does."""

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.bundle.names import GROUPED_FILE
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity import check_parity, float32_bound
from outrider.export.certificate.reference import Reference
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.weights.blocks import quantize_file

from scripts.check_parity import FAMILIES, random_model
from tests.export.certificate.bounds import within
from tests.gate import few_of

# No width is a multiple of what kernels compute at once: 10, 9 and 2 angles, 72 and 77 columns.
ODD_SIZES = {"vocab_size": 131, "hidden_size": 72, "intermediate_size": 77, "head_dim": 20}
ODD_FAMILIES: dict[str, dict[str, object]] = {
    # Products whose depth is no multiple of 32 are not quantised: those of gpt2 are Gemm nodes, mistral has a window.
    "gpt2": {"n_embd": 96, "n_inner": 160, "vocab_size": 131},
    "mistral": {"vocab_size": 131},
    "gpt_neox": ODD_SIZES | {"head_dim": 18},
    "opt": ODD_SIZES | {"head_dim": 18, "ffn_dim": 77, "word_embed_proj_dim": 72},
}
# Spans of the test of bits lie before their window, across its edge and beyond.
WINDOWED = {
    "mistral", "phi3", "gemma2", "gemma3_text", "gemma4_text", "granite_swa", "mimo_v2_flash",
}  # fmt: skip
# Their heads stay apart.
WITH_SINKS = {"granite_swa", "mimo_v2_flash"}


@pytest.mark.parametrize(
    "family",
    few_of((one for one in FAMILIES if one != "llama"), "gpt2", "qwen2", "mistral", "gemma2"),
)
def test_family_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    model = random_model(family, num_positions=96, **ODD_FAMILIES.get(family, ODD_SIZES))
    path = tmp_path / "model.onnx"
    export_model(model, path)
    bound = float32_bound(Reference(model), read_model_config(model.config), max_gamma=4)
    certificate = check_parity(
        model, path, read_model_config(model.config), max_gamma=4, bound=bound
    )
    assert certificate["rollback"]["num_compared"] > 0
    assert ("window" in certificate) == (family in WINDOWED)
    assert_bits_depend_on_no_neighbour(path, read_model_config(model.config))
    if read_model_config(model.config).has_equal_layers:
        assert derive_grouped_graph(path) == (family not in WITH_SINKS)
    if (grouped := path.with_name(GROUPED_FILE)).exists():
        check_parity(model, grouped, read_model_config(model.config), max_gamma=4, bound=bound)
        assert_bits_depend_on_no_neighbour(grouped, read_model_config(model.config))
    derive_tree_graphs(path)
    trees = check_tree_parity(
        model, path, read_model_config(model.config), max_tree_nodes=40, bound=bound
    )
    assert trees["tree_masks"]["num_greedy_equal"] == trees["tree_masks"]["num_compared"] == 3 * 40
    if family in ODD_FAMILIES.keys() & {"gpt2", "mistral"}:
        assert quantize_file(path, "int8") == 2 * 4 + 1
        check_parity(model, path, read_model_config(model.config), max_gamma=4, bound=within(0.5))
        assert_bits_depend_on_no_neighbour(path, read_model_config(model.config))
    assert model.config._attn_implementation != "outrider_kv"


def assert_bits_depend_on_no_neighbour(path: Path, model_config: ModelConfig) -> None:
    """Rows at different places by spans of 1 to 5 in batches of 1 to 5, against the same in one batch by 6."""
    starts = np.array([0, 37, 82, 59, 18])
    text = np.random.default_rng(5).integers(0, model_config.vocab_size, (5, 88))
    wide = GraphRunner(path, model_config, batch=5, capacity=96)
    wide.extend(text[:, :82], np.zeros(5, np.int64))
    spans = np.stack([row[start : start + 6] for row, start in zip(text, starts, strict=True)])
    expected = wide.extend(spans, starts)
    for batch in range(1, 6):
        runner = GraphRunner(path, model_config, batch=batch, capacity=96)
        runner.extend(text[:batch, :82], np.zeros(batch, np.int64))
        # The engine gives a row alone two tokens.
        for num_tokens in range(2 if batch == 1 else 1, 6):
            found = runner.extend(spans[:batch, :num_tokens], starts[:batch])
            np.testing.assert_array_equal(found, expected[:batch, :num_tokens])
