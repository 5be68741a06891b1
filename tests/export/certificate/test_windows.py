"""The certificate looks beyond a window that is wider than its texts: an edge that is off by one shows in any graph."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle import names
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.certificate import reference as reference_module
from outrider.export.certificate.certify import certify, prepare
from outrider.export.certificate.parity import check_rounding
from outrider.export.certificate.reference import LongText, Reference
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import read_model_config
from outrider.export.weights.blocks import quantize_file
from transformers import PreTrainedModel

from scripts.check_parity import random_model
from tests.export.certificate.bounds import within

# Beyond all texts of a certificate, which reach 48 tokens with this gamma.
WINDOW, MAX_GAMMA, MAX_NODES = 100, 4, 12
LIMITS = {"max_gamma": MAX_GAMMA, "max_tree_nodes": MAX_NODES}
GRAPHS = {
    names.MODEL_FILE: "window",
    names.GROUPED_FILE: "window",
    names.DEVICE_FILE: "window",
    names.TREE_FILE: "tree_window",
    names.DEVICE_TREE_FILE: "tree_window",
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return random_model("gemma3_text", 200, sliding_window=WINDOW, layer_types=layers)


@pytest.fixture(scope="module")
def exported(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows") / "target" / names.MODEL_FILE
    export_model(model, path)
    assert derive_grouped_graph(path)
    derive_tree_graphs(path)
    derive_device_graphs(path, "float32", with_trees=True)
    return path


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> Reference:
    return prepare(model, read_model_config(model.config), **LIMITS)


@pytest.fixture
def path(exported: Path, tmp_path: Path) -> Path:
    """A copy of the graphs, free to be broken."""
    return Path(shutil.copytree(exported.parent, tmp_path / "target")) / names.MODEL_FILE


def windows_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Constants of a graph's windows: what is taken from the positions of queries before they are compared."""
    made = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Greater":
            edge = made[node.input[1]]
            difference = made[edge.input[0]] if edge.op_type == "Unsqueeze" else edge
            yield constants[difference.input[1]]


def move_edge(path: Path, by: int) -> None:
    """Let every window of a graph be wider by so many tokens."""
    model = onnx.load(path, load_external_data=False)
    (window,) = windows_of(model.graph)
    width = onnx.numpy_helper.to_array(window)
    assert width.item() == WINDOW
    window.CopyFrom(onnx.numpy_helper.from_array((width + by).astype(width.dtype), window.name))
    path.write_bytes(model.SerializeToString())


def test_all_graphs_hold_beyond_the_window(
    model: PreTrainedModel, reference: Reference, path: Path
) -> None:
    found = certify(reference, path, read_model_config(model.config), **LIMITS, bound=within(1e-4))
    for part in (found, found["grouped"], found["device"]):
        assert part["window"]["num_greedy_equal"] == part["window"]["num_compared"] == MAX_GAMMA + 2
    for part in (found, found["device"]):
        assert part["tree_window"]["num_greedy_equal"] == part["tree_window"]["num_compared"] == 8


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("file", GRAPHS)
def test_an_edge_off_by_one_is_refused(
    model: PreTrainedModel, reference: Reference, path: Path, file: str, by: int
) -> None:
    move_edge(path.with_name(file), by)
    case = GRAPHS[file]
    with pytest.raises(BundleError, match=rf"/{file}: parity case {case} differs"):
        certify(reference, path, read_model_config(model.config), **LIMITS, bound=within(1e-4))


def test_rounding_is_compared_beyond_the_window(model: PreTrainedModel, path: Path) -> None:
    quantize_file(path, "int8")
    derive_device_graphs(path, "bfloat16", with_trees=False)

    def difference() -> float:
        model_config = read_model_config(model.config)
        case = check_rounding(path, model_config, max_gamma=MAX_GAMMA, bound=None)["window"]
        assert isinstance(case, dict)
        return float(case["max_difference"])

    rounding = difference()
    move_edge(path.with_name(names.DEVICE_FILE), -WINDOW // 2)
    assert difference() > 2 * rounding > 0


def test_a_long_text_is_a_cache_and_nothing_more(model: PreTrainedModel) -> None:
    """A text that is no longer than its prompt is the prompt itself."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, model.config.vocab_size, (2, 9))
    tokens[:, :5] = tokens[0, :5]
    found = Reference(model).behind(LongText(prompt=tokens[:1, :5], past=5), tokens[:, 5:])
    expected = Reference(model).logits(tokens)[:, 5:]
    np.testing.assert_allclose(found.values, expected.values, rtol=0, atol=1e-5)


def test_trees_longer_than_the_window_are_compared_path_by_path() -> None:
    """One mask for all layers would be wrong; each path is a text, of which the first tokens are the tree's own."""
    model = random_model("gemma2", 64)
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, 30)
    chain = Reference(model).tree([*tokens], tuple(range(27)))
    np.testing.assert_allclose(
        chain.values, Reference(model).logits(tokens[None]).values[0], rtol=0, atol=1e-5
    )
    masked = reference_module.tree_logits(model, [*tokens], tuple(range(27)))
    assert np.abs(masked - chain.values).max() > 1e-2


def test_what_is_computed_does_not_grow_with_the_window() -> None:
    model, counted = random_model("mistral", 2000, sliding_window=1900), []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: counted.append(given[0].numel())
    )
    prepare(model, read_model_config(model.config), **LIMITS)
    hook.remove()
    assert max(counted) < 300
