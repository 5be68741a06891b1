import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from outrider.engines.base import BundleError, FloatArray
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.export.weights import blocks
from outrider.export.weights.blocks import BITS, product_moments, quantize_file
from outrider.export.weights.lookup import integer_lookups, part_shared_blocks, rows_of
from outrider.export.weights.widened import load_widened
from outrider.export.weights.written_text import WrittenText
from transformers import AutoModelForCausalLM

from scripts.check_parity import random_model


def test_quantised_bundle_stores_integers_and_says_what_they_cost(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = tiny_checkpoints
    stages: list[str] = []
    bundle = export_bundle(
        target=target,
        draft=draft,
        out=tmp_path / "bundle",
        options=ExportOptions(weights="int4", draft_weights="int8", max_context=64),
        progress=stages.append,
    )
    assert bundle.manifest == load_bundle(tmp_path / "bundle").manifest
    for part, kind in (("target", "int4"), ("draft", "int8")):
        graph = onnx.load(tmp_path / "bundle" / part / "model.onnx").graph
        stored = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        types = {tensor.data_type for tensor in graph.initializer if tensor.name in stored}
        assert types == {onnx.TensorProto.INT8} | (
            {onnx.TensorProto.INT4} if kind == "int4" else set()
        )
        weights = {tensor.name for tensor in graph.initializer}
        assert not [n for n in graph.node if n.op_type == "MatMul" and n.input[1] in weights]
        certificate = bundle.manifest.certificate[part]
        assert isinstance(certificate, dict)
        assert certificate["prefill"]["max_difference"] < 1e-4
        assert 1e-4 < certificate[kind]["prefill"]["max_difference"] < 10
    assert any("int4" in stage for stage in stages)


def test_unknown_weights_are_refused_before_any_work(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="int3"):
        export_small(weights="int3", progress=pytest.fail)
    assert not list(tmp_path.iterdir())


class Stored(NamedTuple):
    """A graph in 16 or 32 bits, and the embedding that it was made of."""

    path: Path
    model_config: ModelConfig
    is_tied: bool
    embedding: FloatArray


@pytest.fixture(
    scope="module", params=[(True, torch.float32), (True, torch.float16), (False, torch.float32)]
)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    is_tied, dtype = request.param
    model = random_model("qwen2", 64, vocab_size=90, tie_word_embeddings=is_tied)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    path = tmp_path_factory.mktemp("embedding") / "model.onnx"
    export_model(model, path, keeps_halves=True)
    config = read_model_config(model.config)
    return Stored(
        path, config, is_tied, model.get_input_embeddings().weight.detach().float().numpy()
    )


@pytest.mark.parametrize("kind", BITS)
def test_an_embedding_is_looked_up_in_blocks_which_a_tied_head_shares(
    stored: Stored, tmp_path: Path, kind: str
) -> None:
    folder, is_tied, own = tmp_path / "target", stored.is_tied, stored.embedding
    path = Path(shutil.copytree(stored.path.parent, folder)) / stored.path.name
    quantize_file(path, kind)
    loaded = ir.load(path)
    ir.external_data.load_to_model(loaded)
    tables = [one for one in loaded.graph.initializers.values() if 90 in one.shape.numpy()]
    kinds = sorted(one.dtype.name for one in tables if one.dtype is not ir.DataType.FLOAT16)
    table = "INT8" if is_tied else "UINT8"
    assert kinds == sorted({table, "INT8"})
    (last,) = integer_lookups(loaded.graph)
    errors = np.abs(rows_of(loaded.graph, last) - own) / np.abs(own).max(axis=1, keepdims=True)
    assert 0 < errors.max() < 0.005


@pytest.mark.parametrize("kind", BITS)
def test_a_tied_head_becomes_one_product_of_blocks_and_stays_in_the_file_once(
    stored: Stored, tmp_path: Path, optimised_graph: Callable[[Path], onnx.GraphProto], kind: str
) -> None:
    """With constants that the lookup reads too, ONNX Runtime would restore the whole head in every call."""
    path = Path(shutil.copytree(stored.path.parent, tmp_path / "target")) / stored.path.name
    quantize_file(path, kind)
    data = path.with_name(f"{path.name}.data")
    before, num_bytes = logits_of(path, stored.model_config), data.stat().st_size
    assert num_restored(optimised_graph(path)) == stored.is_tied
    part_shared_blocks(path)
    assert num_restored(optimised_graph(path)) == 0
    assert data.stat().st_size == num_bytes
    after = logits_of(path, stored.model_config)
    np.testing.assert_allclose(after, before, rtol=0, atol=0.02 * np.abs(before).max())


@pytest.mark.parametrize("kind", BITS)
def test_no_served_graph_of_a_tied_model_restores_its_head(
    export_small: Callable[..., Bundle],
    tiny_checkpoints: tuple[Path, Path],
    optimised_graph: Callable[[Path], onnx.GraphProto],
    tmp_path: Path,
    kind: str,
) -> None:
    tied = Path(shutil.copytree(tiny_checkpoints[1], tmp_path / "tied"))
    model = AutoModelForCausalLM.from_pretrained(tied)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.get_input_embeddings().weight
    model.save_pretrained(tied)
    export_small(target=tied, weights=kind)
    for name in ("model.onnx", "grouped.onnx", "tree.onnx"):
        path = tmp_path / "bundle" / "target" / name
        assert integer_lookups(ir.load(path).graph), name
        assert num_restored(optimised_graph(path)) == 0, name


def logits_of(path: Path, model_config: ModelConfig) -> FloatArray:
    """Logits [1, 3, V] of three tokens."""
    runner = GraphRunner(path, model_config, batch=1, capacity=8)
    return runner.extend(np.array([[5, 17, 89]]), np.zeros(1, dtype=np.int64))


def num_restored(graph: onnx.GraphProto) -> int:
    return sum(node.op_type == "DequantizeLinear" for node in graph.node)


def test_four_bits_leave_eight_to_keys_values_and_all_behind_the_last_of_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnx"
    model = random_model("qwen2", 64, vocab_size=90, num_hidden_layers=3, tie_word_embeddings=False)
    export_model(model, path)
    quantize_file(path, "int4")
    graph = onnx.load(path).graph
    types = {one.name: one.data_type for one in graph.initializer}
    made = {
        node.output[0]: types[node.input[0]]
        for node in graph.node
        if node.op_type == "DequantizeLinear"
    }
    found = [
        made[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in made
    ]
    # Of a layer: queries, keys and values in one product; output; gate and up in one; down. Last the head.
    four, eight = onnx.TensorProto.INT4, onnx.TensorProto.INT8
    assert found == [eight, four, four, four] * 2 + [eight] * 5


def test_layers_that_read_the_caches_of_others_keep_four_bits(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_model(
        random_model("gemma4_text", 64, vocab_size=90, vocab_size_per_layer_input=90), path
    )
    quantize_file(path, "int4")
    graph = onnx.load(path).graph
    types = {one.name: one.data_type for one in graph.initializer}
    stored = [types[node.input[0]] for node in graph.node if node.op_type == "DequantizeLinear"]
    four = stored.count(onnx.TensorProto.INT4)
    # Two layers of their own, one that reads, and the last.
    assert four >= len(stored) / 3


def test_tokens_weigh_alike_in_the_moments(tmp_path: Path) -> None:
    """Each adds a trace of one, however long its values are."""
    path, model = tmp_path / "model.onnx", random_model("qwen2", 64, vocab_size=90)
    export_model(model, path)
    text = WrittenText(np.random.default_rng(0).integers(0, 90, (2, 12)))
    model_config = read_model_config(model.config)
    found = product_moments(load_widened(path).graph, path, model_config, text, 8)
    assert len(found) == 9
    for name, moments in found.items():
        assert np.einsum("pii->", moments) == pytest.approx(text.tokens.size, rel=1e-4), name


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        # Per layer what its first product makes; one more follows.
        (("cache", "cache"), {0, 2, 3}),
        (("cache", "scan", "scan"), {0, 4, 5}),
        (("cache", "taps"), {0, 2, 3}),
        (("scan", "cache"), {2, 3}),
        (("cache",), {0}),
        (("scan",), set()),
    ],
)
def test_what_is_cached_and_the_last_layer_keep_8_bits(
    layers: tuple[str, ...], kept: set[int]
) -> None:
    last, nodes = "x", []

    def add(kind: str, *inputs: str) -> None:
        nonlocal last
        nodes.append(helper.make_node(kind, [last, *inputs], [f"{len(nodes)}"]))
        last = f"{len(nodes) - 1}"

    for layer in layers:
        add("MatMul", "w")
        for kind, given in {
            "cache": (("TensorScatter", "start"), ("Attention", "mask")),
            "scan": (("LinearAttention", "state"),),
            "taps": (("Gather", "taps"),),
        }[layer]:
            add(kind, given)
        add("MatMul", "w")
    names = ("x", "w", "start", "mask", "state", "taps")
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    out = helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None)
    graph = ir.from_proto(helper.make_model(helper.make_graph(nodes, "layers", info, [out]))).graph
    products = [node for node in graph if node.op_type == "MatMul"]
    assert {products.index(node) for node in blocks._delicate(products)} == kept
