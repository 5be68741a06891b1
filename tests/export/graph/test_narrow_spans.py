"""Attention over single tokens is padded in the graph, costs no other span a bit, and can be taken back."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from outrider.engines.base import FloatArray
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.graph.edits import drop_unused
from outrider.export.graph.narrow_spans import drop_query_padding, pad_single_queries
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.weights.blocks import quantize_file
from transformers import AutoConfig

BATCH, CONTEXT = 3, 16


@pytest.fixture(scope="module")
def model_config(tiny_checkpoints: tuple[Path, Path]) -> ModelConfig:
    return read_model_config(AutoConfig.from_pretrained(tiny_checkpoints[0]))


@pytest.fixture(scope="module", params=["float32", "int8"])
def plain_and_padded(
    request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The tiny target's graph without padding, by weights, and the same with padding."""
    folder = tmp_path_factory.mktemp(request.param)
    bundle = load_bundle(tiny_bundle)
    model = ir.load(bundle.model_path(bundle.manifest.target))
    ir.external_data.load_to_model(model)
    paths = folder / "plain.onnx", folder / "padded.onnx"
    for path, edit in zip(paths, (drop_query_padding, pad_single_queries), strict=True):
        edit(model.graph)
        drop_unused(model.graph)
        ir.save(model, path, external_data=f"{path.name}.data")
        if request.param != "float32":
            quantize_file(path, request.param)
    return paths


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def fed(path: Path, model_config: ModelConfig, num_tokens: int) -> FloatArray:
    """Logits [BATCH, CONTEXT, V] of random rows fed by spans of so many tokens, from the first on."""
    text = np.random.default_rng(7).integers(0, model_config.vocab_size, (BATCH, CONTEXT))
    runner = GraphRunner(path, model_config, batch=BATCH, capacity=CONTEXT)
    spans = [
        runner.extend(text[:, at : at + num_tokens], np.full(BATCH, at))
        for at in range(0, CONTEXT, num_tokens)
    ]
    return np.concatenate(spans, axis=1)


def test_single_tokens_of_a_batch_have_the_bits_of_wider_spans(
    plain_and_padded: tuple[Path, Path], model_config: ModelConfig
) -> None:
    plain, padded = plain_and_padded
    expected = fed(plain, model_config, 4)
    assert np.isfinite(expected).all()
    for num_tokens in (1, 2, 4, 8):
        np.testing.assert_array_equal(fed(padded, model_config, num_tokens), expected)


def test_padding_adds_two_nodes_a_layer_and_is_taken_back_whole(
    plain_and_padded: tuple[Path, Path], model_config: ModelConfig, tmp_path: Path
) -> None:
    plain, padded = plain_and_padded
    added = operators(padded) - operators(plain)
    layers = model_config.num_layers
    assert added == Counter(Pad=layers, Slice=layers, Shape=1, Sub=1, Max=1, Concat=1)
    model = ir.load(padded)
    ir.external_data.load_to_model(model)
    drop_query_padding(model.graph)
    drop_unused(model.graph)
    ir.save(model, tmp_path / "again.onnx")
    assert operators(tmp_path / "again.onnx") == operators(plain)
    names = [
        {value for node in onnx.load(path).graph.node for value in (*node.input, *node.output)}
        for path in (plain, tmp_path / "again.onnx")
    ]
    assert names[0] == names[1]
    np.testing.assert_array_equal(
        fed(tmp_path / "again.onnx", model_config, 4), fed(plain, model_config, 4)
    )
