"""The graph that reads shared cache heads once: the bits of the canonical one, certified."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from outrider.engines.base import BundleError, FloatArray, Span
from outrider.engines.bundle import names
from outrider.engines.bundle.names import GROUPED_FILE, MODEL_FILE
from outrider.engines.onnx.packed_inputs import (
    PackedGraph,
    PackedInputs,
    PackedShape,
    cache_columns,
    packed_feeds,
)
from outrider.engines.onnx.session import open_session
from outrider.export.certificate.certify import certify
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from outrider.export.weights.block_products import OPERATOR
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.w8a8 import W8A8, quantize_static
from transformers import LlamaConfig, LlamaForCausalLM

from tests.export.certificate.bounds import within

V = 64
LEAST_TOKENS = 2
"""Of a row, where a head of the cache would be read by a single query; the second is padding."""


@pytest.fixture(scope="module", params=[2, 6], ids=["shared", "unshared"])
def kv_heads(request: pytest.FixtureRequest) -> int:
    """Heads of the cache, of which the demo's target has two."""
    return int(request.param)


@pytest.fixture(scope="module")
def model(kv_heads: int) -> LlamaForCausalLM:
    """Six query heads of 64."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=384,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["float32", "int8", W8A8])
def graphs(
    request: pytest.FixtureRequest,
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """The canonical and the grouped graph, by weights."""
    path = tmp_path_factory.mktemp(request.param) / MODEL_FILE
    export_model(model, path)
    if request.param == W8A8:
        assert quantize_static(path, read_model_config(model.config)) == 2
    elif request.param != "float32":
        quantize_file(path, request.param)
    assert derive_grouped_graph(path)
    return path, path.with_name(GROUPED_FILE)


def feeds(batch: int, num_tokens: int, capacity: int, kv_heads: int) -> dict[str, FloatArray]:
    """Random rows at ragged places, the first at the beginning and the last at the end of its cache."""
    rng = np.random.default_rng([batch, num_tokens, capacity])
    end = capacity - max(num_tokens, LEAST_TOKENS)
    start = np.linspace(0, end, batch).astype(np.int64)
    columns = np.broadcast_to(np.arange(num_tokens), (batch, num_tokens)).copy()
    shape = (batch, kv_heads, capacity, 64)
    return {
        names.TOKENS: rng.integers(0, V, (batch, num_tokens)),
        names.START: start,
        names.LOGIT_POSITIONS: columns,
        # What lies beyond a row's end is not zero: nothing of it may be seen.
        names.key_name(0): rng.normal(0, 3, shape).astype(np.float32),
        names.value_name(0): rng.normal(0, 3, shape).astype(np.float32),
    }


def packed(session: onnxruntime.InferenceSession, given: dict[str, FloatArray]) -> list[FloatArray]:
    """What the grouped graph answers to the feeds of the canonical one."""
    tokens = given[names.TOKENS]
    _, kv_heads, capacity, _ = given[names.key_name(0)].shape
    shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    graph = PackedGraph.of(shapes, num_kv_heads=kv_heads, last=capacity - 1)
    assert graph is not None
    feeds = packed_feeds(graph, tokens, given[names.START], capacity=capacity)
    caches = {name: given[name] for name in (names.key_name(0), names.value_name(0))}
    logits, *written = session.run(None, {**feeds, **caches})
    return [logits.reshape(*tokens.shape, V), *written]


@pytest.mark.parametrize("capacity", [128, 256, 340])
def test_heads_read_once_by_packed_rows_give_the_same_bits(
    graphs: tuple[Path, Path], capacity: int, kv_heads: int
) -> None:
    plain, grouped = (open_session(path, copies_caches=True) for path in graphs)
    shapes = [(rows, width) for rows in (1, 2, 3, 8) for width in (1, 2, 3, 5, 9, 64)]
    for rows, width in shapes:
        if rows == width == 1:  # which engines never run
            continue
        given = feeds(rows, width, capacity, kv_heads)
        expected = plain.run(None, given)
        found = packed(grouped, given)
        assert np.isfinite(expected[0]).all()
        for row, start in enumerate(given[names.START]):
            for cache in (*expected[1:], *found[1:]):
                cache[row, :, start + width : start + LEAST_TOKENS] = 0.0
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_a_row_does_not_see_weighs_nothing(graphs: tuple[Path, Path], kv_heads: int) -> None:
    session = open_session(graphs[1], copies_caches=True)
    given = feeds(3, 5, 128, kv_heads)
    expected = packed(session, given)[0]
    end = given[names.START] + 5
    seen = np.arange(128)[None, None, :, None] < end[:, None, None, None]
    for garbage in (0.0, -1e4, 1e4):
        for name in (names.key_name(0), names.value_name(0)):
            given[name] = np.where(seen, given[name], np.float32(garbage))
        np.testing.assert_array_equal(packed(session, given)[0], expected)


def test_grouped_graph_names_the_weights_of_the_model(graphs: tuple[Path, Path]) -> None:
    """But for blocks of integers, which lie beside it as ``MatMulNBits`` takes them."""
    stored = []
    for path in graphs:
        graph = onnx.load(path, load_external_data=False).graph
        stored.append(
            {
                tensor.name: {entry.key: entry.value for entry in tensor.external_data}
                for tensor in graph.initializer
                if tensor.external_data
            }
        )
        attention = [node for node in graph.node if node.op_type == "Attention"]
        assert len(attention) == 1
    of_model, of_grouped = stored
    own = {name: where for name, where in of_grouped.items() if name not in of_model}
    blocks = [node.input[1:] for node in graph.node if node.op_type == OPERATOR]
    assert [*own] == [name for inputs in blocks for name in inputs]
    data = f"{GROUPED_FILE}.data"
    assert {where["location"] for where in own.values()} == ({data} if own else set())
    shared = {name: where for name, where in of_grouped.items() if name not in own}
    assert shared
    assert shared.items() <= of_model.items()
    files = {path.name for path in graphs[0].parent.glob("*.data")}
    assert files == {f"{MODEL_FILE}.data", *([data] if own else [])}


def test_no_weight_multiplies_a_rectangle(graphs: tuple[Path, Path], kv_heads: int) -> None:
    """As many rows as there are tokens up to the last attention, of which there is one, and wanted ones behind it."""
    path = graphs[1].with_name("probe.onnx")
    model = onnx.load(graphs[1], load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    products = [
        node.output[0]
        for node in model.graph.node
        if node.op_type in ("MatMul", OPERATOR)
        and (node.input[1] in weights or made[node.input[1]].op_type != "Softmax")
    ]
    assert len(products) == 5  # heads, their answers, two of the MLP, logits
    inner = [name for name in products if name != names.LOGITS]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in inner
    )
    onnx.save(model, path)
    session = open_session(path, copies_caches=True)
    shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
    graph = PackedGraph.of(shapes, num_kv_heads=kv_heads, last=127)
    assert graph is not None
    spans = [
        Span(slot=0, start=0, tokens=tuple(range(9)), num_logits=1),
        Span(slot=1, start=0, tokens=(1,), num_logits=1),
        Span(slot=2, start=0, tokens=(), num_logits=0),
    ]
    inputs, shape = PackedInputs(graph, least_rows=1), PackedShape(3, 9, 1, 10, 2)
    inputs.fill(spans, shape)
    caches = {
        name: np.zeros((3, kv_heads, 128, 64), np.float32)
        for name in (names.key_name(0), names.value_name(0))
    }
    found = session.run(
        [names.LOGITS, *inner],
        {**inputs.views(shape), names.CACHE_COLUMNS: cache_columns(128), **caches},
    )
    assert found[0].shape == (1, 2, V)
    assert [values.shape[1] for values in found[1:]] == [10, 2, 2, 2]


def see_one_more(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "LessOrEqual")
    node.op_type = "Less"
    node.input[:] = node.input[::-1]


def mix_groups(graph: onnx.GraphProto) -> None:
    """Queries of a group from every third head instead of from neighbours."""
    node = next(node for node in graph.node if node.op_type == "Attention")
    apart = onnx.numpy_helper.from_array(np.array([0, 3, 2, -1, 64]), "apart")
    together = onnx.numpy_helper.from_array(np.array([0, 2, -1, 64]), "together")
    graph.initializer.extend([apart, together])
    nodes = [
        onnx.helper.make_node("Reshape", [node.input[0], "apart"], ["5d"]),
        onnx.helper.make_node("Transpose", ["5d"], ["crossed"], perm=[0, 2, 1, 3, 4]),
        onnx.helper.make_node("Reshape", ["crossed", "together"], ["mixed"]),
    ]
    node.input[0] = "mixed"
    at = list(graph.node).index(node)
    nodes = [*list(graph.node)[:at], *nodes, *list(graph.node)[at:]]
    del graph.node[:]
    graph.node.extend(nodes)


@pytest.mark.parametrize("break_graph", [see_one_more, mix_groups])
@pytest.mark.parametrize("graphs", ["float32"], indirect=True)
@pytest.mark.parametrize("kv_heads", [2], indirect=True)
def test_certificate_fails_when_the_grouped_graph_is_wrong(
    model: LlamaForCausalLM,
    graphs: tuple[Path, Path],
    break_graph: Callable[[onnx.GraphProto], None],
) -> None:
    path, grouped = graphs
    limits = {"max_gamma": 3, "max_tree_nodes": 0, "bound": within(1e-4)}
    certificate = certify(model, path, read_model_config(model.config), **limits)
    assert set(certificate["grouped"]) >= {"prefill", "single_token", "ragged", "rollback"}
    whole = grouped.read_bytes()
    broken = onnx.load(grouped, load_external_data=False)
    break_graph(broken.graph)
    grouped.write_bytes(broken.SerializeToString())
    try:
        with pytest.raises(BundleError, match=r"/grouped\.onnx: parity case"):
            certify(model, path, read_model_config(model.config), **limits)
    finally:
        grouped.write_bytes(whole)
