"""Experts in a graph: PyTorch's answers, by rows that depend on no neighbour, from weights of any storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.names import GROUPED_FILE, MODEL_FILE
from outrider.export.certificate.feeds import GraphFeeds
from outrider.export.certificate.graph_runner import open_graph
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.checkpoint import open_checkpoint
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.tracing import experts
from outrider.export.graph.tracing.experts import sort_by_expert
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import read_model_config
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.mapped import is_mapped
from transformers import PreTrainedModel

from tests.export.certificate.bounds import within
from tests.export.expert_models import FAMILIES, NUM_EXPERTS, random_experts
from tests.export.test_families import assert_bits_depend_on_no_neighbour
from tests.gate import few_of
from tests.mutants import put_in


@pytest.fixture(scope="module")
def mixtral() -> PreTrainedModel:
    return random_experts("mixtral")


@pytest.fixture(scope="module")
def exported(mixtral: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its graph, which tests copy before they change it."""
    path = tmp_path_factory.mktemp("mixtral") / MODEL_FILE
    export_model(mixtral, path)
    return path


@pytest.mark.parametrize("family", few_of(FAMILIES, "mixtral", "deepseek_v3"))
def test_family_with_experts_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    model, path = random_experts(family), tmp_path / MODEL_FILE
    export_model(model, path)
    model_config = read_model_config(model.config)
    assert model_config.has_experts
    certificate = check_parity(model, path, model_config, max_gamma=4, bound=within(1e-4))
    assert certificate["rollback"]["max_difference"] < 1e-4
    assert_bits_depend_on_no_neighbour(path, model_config)
    assert derive_grouped_graph(path)
    grouped = path.with_name(GROUPED_FILE)
    check_parity(model, grouped, model_config, max_gamma=4, bound=within(1e-4))
    assert_bits_depend_on_no_neighbour(grouped, model_config)
    derive_tree_graphs(path)
    trees = check_tree_parity(model, path, model_config, max_tree_nodes=40, bound=within(1e-4))
    assert trees["tree_masks"]["num_greedy_equal"] == trees["tree_masks"]["num_compared"]
    assert model.config._experts_implementation == "eager"
    assert not [name for name, _ in model.named_modules() if "separate" in name]


def test_keys_and_values_are_cached_as_they_are_expanded_not_as_latents() -> None:
    model_config = read_model_config(random_experts("deepseek_v3").config)
    assert (model_config.num_kv_heads, model_config.head_size) == (4, 16 + 8)


def test_experts_stored_as_integers_give_a_row_the_same_bits_in_every_batch(
    mixtral: PreTrainedModel, exported: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(exported.parent, tmp_path / "target")) / MODEL_FILE
    model_config = read_model_config(mixtral.config)
    # Per layer two projections of attention and two per expert, and the logits; routers stay.
    assert quantize_file(path, "int8") == 2 * (2 + 2 * NUM_EXPERTS) + 1
    graph = onnx.load(path, load_external_data=False).graph
    assert sum(node.op_type == "MatMul" for node in graph.node) == 2 * (3 + 2 * NUM_EXPERTS) + 1
    assert derive_grouped_graph(path)
    for one in (path, path.with_name(GROUPED_FILE)):
        check_parity(mixtral, one, model_config, max_gamma=4, bound=within(1.0))
        assert_bits_depend_on_no_neighbour(one, model_config)


def test_experts_of_a_checkpoint_in_16_bits_are_written_from_its_own(tmp_path: Path) -> None:
    """Transformers stacks what the checkpoint has one by one; no expert is rounded or widened on the way."""
    stored = random_experts("mixtral", intermediate_size=192).to(torch.bfloat16)
    stored.save_pretrained(tmp_path / "checkpoint")
    checkpoint = open_checkpoint(tmp_path / "checkpoint", max_context=64)
    model = checkpoint.load()
    assert is_mapped(model)
    path = tmp_path / "target" / MODEL_FILE
    export_model(model, path, keeps_halves=True)
    check_parity(
        checkpoint.load_as(torch.float32),
        path,
        checkpoint.model_config,
        max_gamma=4,
        bound=within(1e-4),
    )
    kinds = [
        tensor.data_type
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        if 192 in tensor.dims or 2 * 192 in tensor.dims
    ]
    assert kinds == [onnx.TensorProto.BFLOAT16] * (2 * 2 * NUM_EXPERTS)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_an_expert_with_rows_has_one_more_and_one_without_has_none(rows: int) -> None:
    index = torch.from_numpy(np.random.default_rng(rows).integers(0, 5, (rows, 1)))
    index = torch.cat([index, index + 1], dim=1)  # six experts, two different ones per row
    order, sizes, places = sort_by_expert(index, 6)
    counts = torch.bincount(index.reshape(-1), minlength=6)
    assert sizes.tolist() == [count + 1 if count else 0 for count in counts.tolist()]
    assert len(order) == int(sizes.sum())
    owners = torch.repeat_interleave(torch.arange(6), sizes)
    assert owners[places].t().tolist() == index.tolist()
    assert order[places].t().tolist() == [[row, row] for row in range(rows)]


def test_no_product_of_an_expert_has_a_single_row(
    mixtral: PreTrainedModel, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a product may run in another kernel. A graph without the copied rows has some."""
    assert 1 not in numbers_of_rows(mixtral, exported, tmp_path)
    put_in(
        monkeypatch, experts, "_ONNX.Concat(mask, _ONNX.ReduceMax(mask, second), axis=1)", "mask"
    )
    export_model(mixtral, tmp_path / MODEL_FILE)
    assert 1 in numbers_of_rows(mixtral, tmp_path / MODEL_FILE, tmp_path)


def numbers_of_rows(model: PreTrainedModel, path: Path, folder: Path) -> set[int]:
    """Return how many rows experts of the first layer have in calls of 1 to 5 rows."""
    probe, graph = folder / "probe.onnx", onnx.load(path)
    parts = next(list(node.output) for node in graph.graph.node if len(node.output) == NUM_EXPERTS)
    kind = onnx.TensorProto.FLOAT
    graph.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, kind, None) for name in parts
    )
    onnx.save(graph, probe)
    session, found = open_graph(probe), set()
    feeds = GraphFeeds(session, read_model_config(model.config))
    for rows in range(1, 6):
        tokens = np.arange(rows)[:, None]
        span = feeds.span(tokens, np.zeros(rows, np.int64), capacity=8)
        found |= {len(part) for part in session.run(parts, {**span, **feeds.caches(rows, 8)})}
    return found


MUTANTS = {
    "experts in another order": (
        "_ONNX.Concat(*answers, axis=0)",
        "_ONNX.Concat(*answers[::-1], axis=0)",
    ),
    "weights left away": ("_ONNX.Mul(found, factors)", "_ONNX.Identity(found)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_fails_when_experts_are_put_together_wrongly(
    mixtral: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put_in(monkeypatch, experts, *MUTANTS[name])
    export_model(mixtral, tmp_path / MODEL_FILE)
    with pytest.raises(BundleError, match="parity case"):
        check_parity(
            mixtral,
            tmp_path / MODEL_FILE,
            read_model_config(mixtral.config),
            max_gamma=4,
            bound=within(1e-4),
        )
