"""The graphs of accelerators of models with an encoder: how far they answer from PyTorch, and in which types."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import DEVICE_ENCODE_FILE, SOURCE_LENGTH
from outrider.engines.bundle.names import DEVICE_FILE, DEVICE_FILES
from outrider.export.accelerators.device_graphs import derive_device_graphs, drop_device_graphs
from outrider.export.certificate.half_loss import ALLOWED_LOSS
from outrider.export.certificate.parity import check_parity
from outrider.export.certificate.parity_cases import certified_prompts, certified_sources
from outrider.export.certificate.reference import Reference, reference_logits
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.graph.attention_kinds import LENGTHS
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.half_weights import store_halves

from tests.export.accelerators.test_device_graphs import TYPES, types_of
from tests.export.certificate.bounds import within
from tests.export.conftest import Exported

GRAPHS = (DEVICE_FILE, DEVICE_ENCODE_FILE)


def test_float32_graphs_answer_as_pytorch_trees_too(own_text2text: Exported) -> None:
    derive_device_graphs(own_text2text.path, "float32", with_trees=True)
    reference, model_config = Reference(own_text2text.model), own_text2text.model_config
    path = own_text2text.path.with_name(DEVICE_FILE)
    found = check_parity(reference, path, model_config, max_gamma=3, bound=within(1e-4))
    assert {"read_1", "read_longest", "source_reused", "source_widened", "verify"} <= found.keys()
    check_tree_parity(reference, path, model_config, max_tree_nodes=8, bound=within(1e-4))


def test_they_lose_in_16_bits_at_most_twice_what_pytorch_does(own_text2text: Exported) -> None:
    path, model_config = own_text2text.path, own_text2text.model_config
    store_halves(path, "bfloat16")
    derive_device_graphs(path, "bfloat16", with_trees=False)
    reference = Reference(own_text2text.model)
    given = certified_prompts(model_config, 3), certified_sources(model_config)
    halved = reference_logits(copy.deepcopy(own_text2text.model).to(torch.bfloat16), *given)
    lost = float(np.abs(halved - reference.logits(*given).values).max())
    device = path.with_name(DEVICE_FILE)
    check_parity(reference, device, model_config, max_gamma=3, bound=within(ALLOWED_LOSS * lost))
    with pytest.raises(BundleError, match="parity case prefill differs by"):
        check_parity(reference, device, model_config, max_gamma=3, bound=within(lost / 20))


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_attention_products_and_caches_of_sources_have_16_bits(
    own_text2text: Exported, weights: str, precision: str
) -> None:
    path = own_text2text.path
    if weights == "int4":
        quantize_file(path, weights, own_text2text.model_config)
    derive_device_graphs(path, precision, with_trees=False)
    for file in GRAPHS:
        model = onnx.load(path.with_name(file), load_external_data=False)
        kinds = types_of(model.graph)
        for node in model.graph.node:
            if node.op_type in ("Attention", "MatMul", "MatMulNBits"):
                # Of attention, a bias too.
                read = node.input[:4] if node.op_type == "Attention" else node.input[:1]
                assert {kinds[name] for name in read if name} == {TYPES[precision]}, node.name
        caches = {name for name in kinds if ".0" in name and name.startswith(("cross_", "new_"))}
        assert {kinds[name] for name in caches} == {TYPES[precision]}


def test_lengths_of_sources_are_read_as_they_are_given(own_text2text: Exported) -> None:
    """What a graph computes of a shape is computed on the host, and copied to the device in every call."""
    derive_device_graphs(own_text2text.path, "float32", with_trees=False)
    for file in GRAPHS:
        graph = onnx.load(own_text2text.path.with_name(file), load_external_data=False).graph
        attended = {node.input[LENGTHS] for node in graph.node if node.op_type == "Attention"}
        written = {node.input[2] for node in graph.node if node.op_type == "TensorScatter"}
        if file == DEVICE_FILE:
            assert (attended, written) == ({"lengths", SOURCE_LENGTH}, {"start"})
        else:
            assert (attended, len(written)) == ({SOURCE_LENGTH}, 1)
            (zero,) = (node for node in graph.node if node.output[0] in written)
            assert (zero.op_type, set(zero.input)) == ("Sub", {SOURCE_LENGTH})


def test_nothing_of_them_is_left_where_they_are_dropped(own_text2text: Exported) -> None:
    before = sorted(file.name for file in own_text2text.path.parent.iterdir())
    quantize_file(own_text2text.path, "int8", own_text2text.model_config)
    derive_device_graphs(own_text2text.path, "bfloat16", with_trees=True)
    found = {file.name for file in own_text2text.path.parent.glob("device*")}
    assert found == {*DEVICE_FILES, *GRAPHS, *(f"{name}.data" for name in GRAPHS)}
    drop_device_graphs(own_text2text.path)
    assert sorted(file.name for file in own_text2text.path.parent.iterdir()) == before
