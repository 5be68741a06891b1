"""Tree graphs share their weights, and their certificate can fail."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.names import ANCESTORS, GROUPED_FILE, MODEL_FILE, POSITIONS, TREE_FILE
from outrider.engines.onnx.session import open_session
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import read_model_config
from outrider.export.weights.block_products import OPERATOR
from outrider.export.weights.blocks import quantize_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.export.certificate.bounds import within

NUM_NODES = 16


@pytest.fixture
def graphs(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target's folder, free to be broken."""
    return Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target"))


@pytest.fixture(scope="module")
def model(tiny_checkpoints: tuple[Path, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).eval()


def certify(
    model: PreTrainedModel,
    folder: Path,
    *,
    tolerance: float = 1e-4,
    num_nodes: int = NUM_NODES,
    seed: int = 0,
) -> Mapping[str, object]:
    return check_tree_parity(
        model,
        folder / MODEL_FILE,
        read_model_config(model.config),
        max_tree_nodes=num_nodes,
        bound=within(tolerance),
        seed=seed,
    )


def stored_weights(path: Path) -> dict[str, dict[str, str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.external_data
    }


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_tree_graph_names_the_weights_of_the_model(graphs: Path, weights: str) -> None:
    if weights == "int8":
        quantize_file(graphs / MODEL_FILE, weights)
        (graphs / GROUPED_FILE).unlink()
        derive_tree_graphs(graphs / MODEL_FILE)
    weights_of_model = stored_weights(graphs / MODEL_FILE)
    assert stored_weights(graphs / "tree.onnx") == weights_of_model
    assert weights_of_model
    assert sorted(path.name for path in graphs.iterdir() if path.suffix == ".data") == [
        "model.onnx.data"
    ]


def test_trees_have_the_products_of_packed_rows(graphs: Path) -> None:
    """Whether ONNX Runtime makes such products of blocks itself, or not: bits of trees and chains are the same."""
    quantize_file(graphs / MODEL_FILE, "int8")
    assert derive_grouped_graph(graphs / MODEL_FILE)
    derive_tree_graphs(graphs / MODEL_FILE)
    stored, products = [], []
    for name in (GROUPED_FILE, TREE_FILE):
        stored.append(stored_weights(graphs / name))
        graph = onnx.load(graphs / name, load_external_data=False).graph
        products.append(
            [
                [(one.name, one.i) for one in node.attribute] + [*node.input[1:]]
                for node in graph.node
                if node.op_type == OPERATOR
            ]
        )
    assert products[0] == products[1] != []
    assert stored[0] == stored[1]
    assert f"{GROUPED_FILE}.data" in str(stored[0])
    open_session(graphs / TREE_FILE, copies_caches=True)


def test_int8_trees_are_as_far_from_the_checkpoint_as_int8_chains(
    model: PreTrainedModel, graphs: Path
) -> None:
    path, model_config = graphs / MODEL_FILE, read_model_config(model.config)
    quantize_file(path, "int8")
    assert derive_grouped_graph(path)
    derive_tree_graphs(path)
    chains = check_parity(model, path, model_config, max_gamma=NUM_NODES - 1, bound=None)["verify"]
    assert isinstance(chains, dict)
    trees = certify(model, graphs, tolerance=2 * chains["max_difference"])
    assert trees["tree_masks"]["max_difference"] > chains["max_difference"] / 2 > 1e-3


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7])
def test_the_deepest_trees_leave_room_for_what_follows(
    model: PreTrainedModel, graphs: Path, num_nodes: int
) -> None:
    for seed in range(4):
        certify(model, graphs, num_nodes=num_nodes, seed=seed)


def make_causal(graph: onnx.GraphProto) -> None:
    """Every token sees all tokens before it: the mask of a chain."""
    for node in graph.node:
        if node.op_type == "GatherElements" and node.input[0] == ANCESTORS:
            size = onnx.helper.make_node("Shape", [ANCESTORS], ["all.shape"])
            one = onnx.helper.make_tensor("one", onnx.TensorProto.BOOL, [1], [True])
            ones = onnx.helper.make_node("ConstantOfShape", ["all.shape"], ["all"], value=one)
            lower = onnx.helper.make_node("Trilu", ["all"], ["lower"], upper=0)
            node.input[0] = "lower"
            break
    nodes = [size, ones, lower, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def shift_positions(graph: onnx.GraphProto) -> None:
    one = onnx.helper.make_node("Constant", [], ["one"], value_int=1)
    moved = onnx.helper.make_node("Add", [POSITIONS, "one"], ["moved"])
    for node in graph.node:
        node.input[:] = ["moved" if name == POSITIONS else name for name in node.input]
    nodes = [one, moved, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def keep_the_first_layer_only(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.output[0].endswith(".1") and node.op_type == "TensorScatter":
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]


@pytest.mark.parametrize(
    ("file", "break_graph", "case"),
    [
        ("tree.onnx", make_causal, "tree_masks"),
        ("tree.onnx", shift_positions, "tree_masks"),
        ("keep_path.onnx", keep_the_first_layer_only, "tree_paths"),
    ],
)
def test_certificate_fails_when_a_tree_graph_is_wrong(
    model: PreTrainedModel,
    graphs: Path,
    file: str,
    break_graph: Callable[[onnx.GraphProto], None],
    case: str,
) -> None:
    certify(model, graphs)
    broken = onnx.load(graphs / file, load_external_data=False)
    break_graph(broken.graph)
    (graphs / file).write_bytes(broken.SerializeToString())
    with pytest.raises(BundleError, match=f"parity case {case}"):
        certify(model, graphs)


def test_graph_that_takes_no_mask_is_refused(graphs: Path) -> None:
    model = onnx.load(graphs / MODEL_FILE, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    attribute = next(one for one in node.attribute if one.name == "is_causal")
    attribute.i = 0
    (graphs / MODEL_FILE).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="takes no tree mask; export with max_tree_nodes 0"):
        derive_tree_graphs(graphs / MODEL_FILE)


def test_graph_without_positions_is_refused(graphs: Path) -> None:
    model = onnx.load(graphs / MODEL_FILE, load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["other" if name == "span_positions" else name for name in names]
    (graphs / MODEL_FILE).write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="uses no positions"):
        derive_tree_graphs(graphs / MODEL_FILE)
