"""GPTQ and AWQ checkpoints: read exactly, and stored as they are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.certificate.certify import certify_bundle
from outrider.export.checkpoint import open_checkpoint
from outrider.export.pipeline import export_bundle
from safetensors.torch import load_file, save_file

from tests.export.test_families import assert_bits_depend_on_no_neighbour
from tests.export.weights.packed_models import Packing, Quantised, plain_model, write_packed_llama
from tests.export.weights.test_block_products import assert_the_operator_is_the_same

PACKINGS = {
    "gptq": Packing(method="gptq", is_symmetric=True),
    "gptq without symmetry": Packing(method="gptq", group_size=64),
    "gptq in 8 bits, rows ordered": Packing(method="gptq", bits=8, orders_rows=True),
    "gptq_v2 of one group": Packing(method="gptq", form="gptq_v2", group_size=-1),
    "awq": Packing(method="awq", group_size=16),
}


def written(folder: Path, packing: Packing) -> tuple[Path, dict[str, Quantised]]:
    folder = folder / "packed"
    return folder, write_packed_llama(folder, packing)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_a_packed_checkpoint_is_the_model_of_its_weights(tmp_path: Path, packing: Packing):
    folder, drawn = written(tmp_path, packing)
    loaded = open_checkpoint(folder, max_context=64).load().state_dict()
    expected = plain_model(folder, drawn, tmp_path / "plain").state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def stored_products(path: Path) -> list[tuple[ir.Node, list[np.ndarray]]]:
    """Products that read blocks, with integers, scales and zero points."""
    graph = ir.load(path).graph
    blocks = [node for node in graph if node.op_type == "DequantizeLinear"]
    return [
        (node.outputs[0].uses()[0].node, [value.const_value.numpy() for value in node.inputs])
        for node in blocks
    ]


@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "gptq_v2 of one group"])
def test_integers_scales_and_zero_points_are_stored_as_they_are(tmp_path: Path, name: str):
    packing = PACKINGS[name]
    folder, drawn = written(tmp_path, packing)
    bundle = export_bundle(
        target=folder,
        draft=None,
        out=tmp_path / "bundle",
        max_context=64,
        max_tree_nodes=8,
        progress=lambda _: None,
    )
    kind = f"{packing.method}-int{packing.bits}"
    assert bundle.manifest.target.weights == kind
    products = stored_products(bundle.root / "target" / "model.onnx")
    # Queries, keys and values are one product, gates and what they gate another.
    assert len(products) == 4
    found = {
        (integers.astype(np.int64) + (0 if zeros else 1 << (packing.bits - 1)))[:, 0].tobytes()
        for _, (integers, _, *zeros) in products
    }
    firsts = ("q_proj", "o_proj", "gate_proj", "down_proj")
    for name, one in drawn.items():
        if name.endswith(firsts):
            order = np.argsort(one.groups, kind="stable")
            assert one.integers[order, 0].tobytes() in found, name
    for product, (_, scales, *zeros) in products:
        assert bool(zeros) is not packing.is_symmetric
        assert {float(one) for one in scales.reshape(-1)} <= {
            float(value) for one in drawn.values() for value in one.scales.reshape(-1)
        }
        left = product.inputs[0].producer()
        assert (left.op_type == "Gather") is packing.orders_rows
    certificate = bundle.manifest.certificate["target"]
    assert certificate["prefill"]["max_difference"] < 1e-4
    assert certificate["kept_blocks"]["verify"]["max_difference"] < 1e-4
    assert certificate[kind]["grouped"]["verify"]["max_difference"] < 1
    assert bundle.manifest.target.device_precision == "float16"
    certify_bundle(bundle, {"target": folder})
    path = bundle.root / "target" / "model.onnx"
    facts = open_checkpoint(folder, max_context=64).facts
    for graph in (path, path.with_name("grouped.onnx")):
        assert_bits_depend_on_no_neighbour(graph, facts)
    # The head is not packed.
    constants = 2 if packing.is_symmetric else 3
    assert_the_operator_is_the_same(path, 4, num_constants=constants, num_others=1)


def test_other_weights_than_the_checkpoints_are_refused_but_float32(tmp_path: Path):
    folder, _ = written(tmp_path, PACKINGS["gptq"])
    fixed = {"target": folder, "draft": None, "out": tmp_path / "bundle", "max_context": 64}
    with pytest.raises(BundleError, match="would be rounded again as int8"):
        export_bundle(**fixed, weights="int8", progress=pytest.fail)
    bundle = export_bundle(**fixed, weights="float32", max_tree_nodes=0, progress=lambda _: None)
    assert bundle.manifest.target.weights == "float32"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "fp8"}, "quantised by fp8 are not read"),
        ({"quant_method": "mxfp4"}, "quantised by mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "quantised by compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "gptq weights of 3 bits"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "awq weights of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "format 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, quantization: dict, words: str):
    folder, _ = written(tmp_path, PACKINGS["gptq"])
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))
    with pytest.raises(BundleError, match=f"^packed: .*{words}"):
        open_checkpoint(folder, max_context=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"),
            r"up_proj\.scales is missing",
        ),
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            "1 weights are in none of the files: model.norm.weight",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.ones(4)}),
            "model.layers.0.mlp.act.scales is no weight of the model",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.up_proj.g_idx": torch.full((64,), 9)}
            ),
            "64 rows do not fit 2 groups",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_line(tmp_path: Path, change, words: str):
    folder, _ = written(tmp_path, PACKINGS["gptq"])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BundleError, match=words):
        open_checkpoint(folder, max_context=64).load()


def test_rows_ordered_apart_for_one_input_are_refused_by_name(tmp_path: Path):
    folder, _ = written(tmp_path, PACKINGS["gptq in 8 bits, rows ordered"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BundleError, match="order their rows in different ways; export with"):
        export_bundle(
            target=folder,
            draft=None,
            out=tmp_path / "bundle",
            max_context=64,
            progress=lambda _: None,
        )


def test_a_zero_point_of_nought_is_read_where_it_was_borrowed_for(tmp_path: Path):
    """GPTQModel stores words less 0x11111111, so a 0 borrows from the integer above it."""
    from outrider.export.weights.packed.matrices import PackedLayout, unpack

    zeros = np.array([[3, 0, 15, 8, 1, 0, 7, 2]])
    word = sum(int(one) << (4 * at) for at, one in enumerate(zeros[0]))
    stored = np.array([[(word - 0x11111111) % 2**32]], np.uint32).view(np.int32)
    layout = PackedLayout(method="gptq", bits=4, group_size=None, adds_one=True)
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.from_numpy(stored),
        "scales": torch.ones(1, 8),
    }
    assert unpack(layout, tensors).zero_points.tolist() == zeros.tolist()
    given = unpack(replace(layout, adds_one=False), tensors)
    assert given.zero_points.tolist() != zeros.tolist()
