"""Weights of both graphs of an encoder-decoder model: stored alike, measured on text, in one file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.parity_cases import draw_sources
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.weights.block_products import OPERATOR
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.half_weights import store_halves
from outrider.export.weights.shared_data import share_data
from outrider.export.weights.w8a8 import W8A8, quantize_static
from outrider.export.weights.written_text import observe, write_text

from tests.export.certificate.bounds import within
from tests.export.conftest import Exported
from tests.export.weights.integer_sums import overflow

ENCODER_PRODUCTS = 2 * 4 + 1
"""Of two layers; that of all caches of the source is one."""
DECODER_PRODUCTS = 3 * 6 + 1
# Each way of storing once: blocks, and products that read 8 bits.
ORDINARY = ("int8", W8A8)
TOLERANCES = {"float16": 0.1, "int8": 1.5, W8A8: 1.5, "int4": 4.0}


def stored_products(path: Path) -> int:
    """Products whose weights are not float32 constants."""
    graph = onnx.load(path, load_external_data=False).graph
    wide = {one.name for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    return sum(node.input[1] not in wide for node in products)


@pytest.mark.parametrize(
    "kind",
    [one if one in ORDINARY else pytest.param(one, marks=pytest.mark.long) for one in TOLERANCES],
)
@pytest.mark.parametrize("text2text", ["t5"], indirect=True)
def test_both_graphs_store_their_products_alike(own_text2text: Exported, kind: str) -> None:
    path, model_config = own_text2text.path, own_text2text.model_config
    if kind == W8A8:
        assert quantize_static(path, model_config) > ENCODER_PRODUCTS / 2
    elif kind == "float16":
        store_halves(path, kind)
    else:
        quantize_file(path, kind, model_config)
    assert stored_products(path) == DECODER_PRODUCTS
    assert stored_products(path.with_name(ENCODE_FILE)) == ENCODER_PRODUCTS
    # Products of 32 rows round coarsely, and grouped.onnx by the same.
    # 1.56 where sums overflow.
    more = 2.0 if kind == W8A8 and overflow() else 1.0
    bound = within(more * TOLERANCES[kind])
    found = check_parity(own_text2text.model, path, model_config, max_gamma=3, bound=bound)
    assert derive_grouped_graph(path)
    grouped = path.with_name("grouped.onnx")
    again = check_parity(own_text2text.model, grouped, model_config, max_gamma=3, bound=bound)
    operators = [node.op_type for node in onnx.load(grouped, load_external_data=False).graph.node]
    assert stored_products(grouped) + operators.count(OPERATOR) == DECODER_PRODUCTS
    # Of model.onnx ONNX Runtime (1.31.1) makes no MatMulNBits where Relu follows, nor of a head whose blocks the lookup
    # of tokens reads too (an export parts the two), and multiplies in 32 bits.
    assert (again == found) is (OPERATOR not in operators)


def test_encoders_are_observed_on_what_the_model_wrote(text2text: Exported) -> None:
    path, model_config = text2text.path, text2text.model_config
    text = write_text(path, model_config)
    assert text.sources is not None
    assert (text.tokens[:, 0] == text2text.model.config.decoder_start_token_id).all()
    assert text.sources.tokens.shape == text.tokens.shape == (16, 128)
    runner = GraphRunner(path, model_config, batch=16, capacity=128, source_capacity=128)
    runner.read(text.sources)
    logits = runner.extend(text.tokens, np.zeros(16, np.int64))
    # Tokens are likely where they stand, far above chance.
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    probs = shifted / shifted.sum(-1, keepdims=True)
    drawn = np.take_along_axis(probs[:, :-1], text.tokens[:, 1:, None], axis=2)
    assert drawn.mean() > 1.5 / model_config.vocab_size
    encode = path.with_name(ENCODE_FILE)
    graph = onnx.load(encode, load_external_data=False).graph
    names = [node.input[0] for node in graph.node if node.op_type == "MatMul"]
    observed = observe(encode, model_config, names, text)
    assert {len(values) for values in observed.values()} == {16 * 128}
    assert not encode.with_name("observed.onnx").exists()


def test_shared_data_holds_equal_weights_once_and_moves_none(own_text2text: Exported) -> None:
    path = own_text2text.path
    encode, data = path.with_name(ENCODE_FILE), path.with_name(f"{path.name}.data")
    before, size = data.read_bytes(), encode.with_name(f"{ENCODE_FILE}.data").stat().st_size
    sources = draw_sources(own_text2text.model_config, [9, 1, 5], seed=0)
    tokens = np.arange(1, 13).reshape(3, 4)

    def logits() -> np.ndarray:
        runner = GraphRunner(
            path, own_text2text.model_config, batch=3, capacity=8, source_capacity=12
        )
        runner.read(sources)
        return runner.extend(tokens, np.zeros(3, np.int64))

    expected = logits()
    share_data(path, encode)
    after = data.read_bytes()
    assert after[: len(before)] == before
    embedding = 96 * 32 * 4
    padding = 4096 * len(onnx.load(encode, load_external_data=False).graph.initializer)
    assert len(after) - len(before) <= size - embedding + padding
    assert not encode.with_name(f"{ENCODE_FILE}.data").exists()
    np.testing.assert_array_equal(logits(), expected)
    offsets = [entries(path), entries(encode)]
    assert offsets[0] & offsets[1], "no weight is shared"


def entries(path: Path) -> set[tuple[str, str]]:
    """Places of the weights of a graph, by file."""
    graph = onnx.load(path, load_external_data=False).graph
    stored = ({one.key: one.value for one in tensor.external_data} for tensor in graph.initializer)
    return {(one["location"], one["offset"]) for one in stored if one}
