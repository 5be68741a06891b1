"""The graphs of accelerators in 16 bits: what is stored, in which type, and how far from float32 they answer."""

import copy
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from outrider.engines.base import BundleError
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.certificate.graph_runner import open_graph
from outrider.export.certificate.half_loss import ALLOWED_LOSS
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.parity_cases import certified_prompts
from outrider.export.certificate.reference import Reference, reference_logits
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.half_weights import store_halves

from scripts.check_parity import random_model
from tests.export.accelerators.tensorrt.test_graph import run_graph
from tests.export.certificate.bounds import within

TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
# Largest |difference| of logits, which reach 6, and caches; eight times as many bits, eight times as near.
ATOL = {"float16": 6e-2, "bfloat16": 0.48}
STORED = [("float16", "float16"), ("bfloat16", "bfloat16")]
STORED += [(kind, precision) for kind in ("int8", "int4") for precision in TYPES]


@pytest.mark.parametrize(("weights", "precision"), STORED)
def test_products_attention_and_caches_have_16_bits_over_the_stored_weights(
    tiny_bundle: Path, tmp_path: Path, weights: str, precision: str
) -> None:
    path = Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target")) / "model.onnx"
    store = store_halves if weights in TYPES else quantize_file
    store(path, weights)
    derive_device_graphs(path, precision, with_trees=True)
    size = path.with_name("model.onnx.data").stat().st_size
    own = path.with_name("device.onnx.data")
    # Scales of blocks; and, where ONNX Runtime makes no operator of blocks, the blocks.
    own_size = own.stat().st_size if own.exists() else 0
    is_named = weights not in TYPES and precision == "bfloat16"
    assert (own_size > 0.2 * size) == is_named
    assert own_size < (0.7 if is_named else 0.05) * size
    for name in ("device.onnx", "device_tree.onnx"):
        model = onnx.load(path.with_name(name), load_external_data=False)
        assert model.ByteSize() < 30_000
        kinds = types_of(model.graph)
        attended = [node for node in model.graph.node if node.op_type == "Attention"]
        products = [node for node in model.graph.node if node.op_type.startswith("MatMul")]
        assert {node.op_type for node in products} == {"MatMulNBits" if is_named else "MatMul"}
        assert {kinds[node.input[0]] for node in (*attended, *products)} == {TYPES[precision]}
        caches = {value.name for value in model.graph.input} & kinds.keys()
        assert {kinds[name] for name in caches if "." in name} == {TYPES[precision]}
        # No cast of a weight: all are read as they are stored.
        constants = {value.name for value in model.graph.initializer}
        assert not [
            node
            for node in model.graph.node
            if node.op_type == "Cast" and node.input[0] in constants
        ]
    expected = run_graph(path, open_graph(path, exact_blocks=True))
    num_heads = expected["new_key.0"].shape[1]
    found = run_graph(path, open_graph(path.with_name("device.onnx")), num_heads=num_heads)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=ATOL[precision])
    assert np.abs(found["logits"] - expected["logits"]).max() > ATOL[precision] / 100


def types_of(graph: onnx.GraphProto) -> dict[str, int]:
    """Element types of a graph's values, by name, as far as it declares them."""
    declared = (*graph.input, *graph.output, *graph.value_info)
    kinds = {value.name: value.type.tensor_type.elem_type for value in declared}
    return kinds | {value.name: value.data_type for value in graph.initializer}


def test_another_precision_leaves_nothing_of_the_last(tiny_bundle: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_bundle / "target", tmp_path / "target")) / "model.onnx"
    quantize_file(path, "int8")
    derive_device_graphs(path, "bfloat16", with_trees=True)
    derive_device_graphs(path, "float32", with_trees=False)
    assert sorted(file.name for file in path.parent.glob("device*")) == ["device.onnx"]


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_families_lose_in_bfloat16_at_most_twice_what_pytorch_does(
    family: str, tmp_path: Path
) -> None:
    """Of products with biases, equal parts, learnt positions; and of scores that are capped."""
    model = random_model(family, num_positions=96)
    model_config, reference = read_model_config(model.config), Reference(model)
    path = tmp_path / "target" / "model.onnx"
    export_model(model, path)
    store_halves(path, "bfloat16")
    derive_device_graphs(path, "bfloat16", with_trees=False)
    prompts = certified_prompts(model_config, 4)
    halved = reference_logits(copy.deepcopy(model).to(torch.bfloat16), prompts)
    lost = float(np.abs(halved - reference.logits(prompts).values).max())
    device = path.with_name("device.onnx")
    check_parity(reference, device, model_config, max_gamma=4, bound=within(ALLOWED_LOSS * lost))
    with pytest.raises(BundleError, match="parity case prefill differs by"):
        check_parity(reference, device, model_config, max_gamma=4, bound=within(lost / 20))
