"""Attention sinks: in PyTorch as Transformers computes them, and in the graph with bits that depend on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.accelerators.tensorrt.graph import derive_graph
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.tracing import attention, kv_export
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import read_model_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from scripts.check_parity import SIZES, random_model
from tests.export.certificate.bounds import within
from tests.export.graph.tracing.test_windows import MIXED, NUM_POSITIONS, Texts
from tests.mutants import assert_caught


def with_sinks(family: str) -> PreTrainedModel:
    """A model whose sinks weigh as much as some of its tokens."""
    if family == "granite_swa":
        model = random_model(family, NUM_POSITIONS, **MIXED)
    else:
        torch.manual_seed(3)
        sizes = SIZES | MIXED | {"max_position_embeddings": NUM_POSITIONS, "num_local_experts": 4}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **sizes), experts_implementation="eager"
        ).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(0, 2)
    return model


@pytest.mark.parametrize("family", ["granite_swa", "gpt_oss"])
def test_spans_have_the_logits_of_whole_texts(family: str) -> None:
    assert Texts(with_sinks(family)).check().found == {6}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (kv_export, "output = beside_sinks(answers, scores, s_aux)", "output = answers"),
        (kv_export, "beside_sinks(answers, scores, s_aux)", "beside_sinks(answers, scores, s_aux.flip(0))"),
        (attention, "reshape(1, -1, 1, 1) - most", "reshape(1, -1, 1, 1)"),
        (attention, "total + (sinks", "(sinks"),
        (attention, "[..., :1]", "[..., :1] + 1"),
    ],
)  # fmt: skip
def test_a_mistake_shows(
    module: object, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(monkeypatch, module, old, new, Texts(with_sinks("granite_swa")).check)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return with_sinks("gpt_oss")


@pytest.fixture(scope="module")
def path(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sinks") / "target" / "model.onnx"
    export_model(model, path)
    return path


def test_graphs_of_gpt_oss_answer_as_pytorch_does(model: PreTrainedModel, path: Path) -> None:
    model_config = read_model_config(model.config)
    derive_tree_graphs(path)
    assert (
        check_parity(model, path, model_config, max_gamma=3, bound=within(1e-4))["window"][
            "num_compared"
        ]
        == 5
    )
    assert check_tree_parity(model, path, model_config, max_tree_nodes=16, bound=within(1e-4))[
        "tree_window"
    ]


def test_attention_writes_no_cache_of_its_own(path: Path) -> None:
    nodes = onnx.load(path, load_external_data=False).graph.node
    outputs = [list(node.output) for node in nodes if node.op_type == "Attention"]
    assert [(len(names), names[1:3]) for names in outputs] == [(4, ["", ""])] * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_bits_are_those_of_any_capacity(model: PreTrainedModel, path: Path, batch: int) -> None:
    model_config = read_model_config(model.config)
    tokens = np.random.default_rng(6).integers(0, model_config.vocab_size, (batch, 33))
    answers = []
    for capacity in (40, 64, 100, 257, 264, 320, 1024):
        runner = GraphRunner(path, model_config, batch=batch, capacity=capacity)
        start = np.zeros(batch, np.int64)
        parts = [runner.extend(tokens[:, :31], start), runner.extend(tokens[:, 31:], start + 31)]
        answers.append(np.concatenate(parts, axis=1))
    for other in answers[1:]:
        np.testing.assert_array_equal(other, answers[0])


def test_graphs_of_accelerators_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="target: attention with sinks has no graph for the CUDA"):
        derive_device_graphs(path, "float32", with_trees=False)
    with pytest.raises(BundleError, match="target: attention with sinks has no TensorRT plan"):
        derive_graph(path, tmp_path / "plan.onnx", capacity=64, precision="float32")
