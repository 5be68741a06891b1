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
from outrider.export.certificate.parity import check_parity
from outrider.export.checkpoint import open_checkpoint
from outrider.export.graph.edits import folded
from outrider.export.graph.to_onnx import export_model
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.export.progress import untold
from outrider.export.weights.packed.blocks import keep_blocks
from safetensors.torch import load_file, save_file

from scripts.check_parity import random_model
from tests.conftest import write_llama
from tests.export.certificate.bounds import within
from tests.export.expert_models import random_experts
from tests.export.test_families import assert_bits_depend_on_no_neighbour
from tests.export.weights.packed_models import (
    Packing,
    Quantised,
    pack_folder,
    plain_model,
    write_packed_llama,
)
from tests.export.weights.test_block_products import assert_the_operator_is_the_same
from tests.gate import few_of

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


def test_a_module_may_lie_in_several_files_without_groups_by_row(tmp_path: Path):
    folder, drawn = written(tmp_path, PACKINGS["gptq"])
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [name for name in whole if not name.endswith("g_idx")]
    places = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: whole[name] for name, place in places.items() if place == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    loaded = open_checkpoint(folder, max_context=64).load().state_dict()
    for module, one in drawn.items():
        assert loaded[f"{module}.weight"].T.numpy().tobytes() == one.weight.tobytes(), module


def stored_products(path: Path) -> list[tuple[ir.Node, list[np.ndarray]]]:
    """Products that read blocks, with integers, scales and zero points."""
    graph = ir.load(path).graph
    blocks = [node for node in graph if node.op_type == "DequantizeLinear"]
    return [
        (node.outputs[0].uses()[0].node, [folded(value) for value in node.inputs])
        for node in blocks
    ]


@pytest.mark.parametrize(
    "name",
    few_of(
        (one for one in PACKINGS if one != "gptq_v2 of one group"), "gptq without symmetry", "awq"
    ),
)
def test_integers_scales_and_zero_points_are_stored_as_they_are(tmp_path: Path, name: str):
    packing = PACKINGS[name]
    folder, drawn = written(tmp_path, packing)
    bundle = export_bundle(
        target=folder,
        draft=None,
        out=tmp_path / "bundle",
        options=ExportOptions(max_context=64, max_tree_nodes=8),
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
    model_config = open_checkpoint(folder, max_context=64).model_config
    for graph in (path, path.with_name("grouped.onnx")):
        assert_bits_depend_on_no_neighbour(graph, model_config)
    # The head is not packed.
    constants = 2 if packing.is_symmetric else 3
    assert_the_operator_is_the_same(path, 4, num_constants=constants, num_others=1)


@pytest.mark.parametrize(
    ("family", "part_of_names", "num_products"),
    # Each expert's gate and what it gates are one product; the router is not packed. GPT-2 turns no weight.
    [("mixtral", "experts.", 2 * 4 * 2), ("gpt2", "c_", 2 * 4)],
)
def test_experts_and_unturned_weights_are_found_again(
    tmp_path: Path, family: str, part_of_names: str, num_products: int
):
    model = random_experts(family) if family == "mixtral" else random_model(family, 96)
    folder, path = tmp_path / "packed", tmp_path / "target" / "model.onnx"
    model.save_pretrained(folder)
    is_turned = family == "mixtral"
    packing = Packing(method="awq")
    drawn = pack_folder(folder, packing, part_of_names, is_turned=is_turned)
    plain = plain_model(folder, drawn, tmp_path / "plain", is_turned=is_turned)
    plain.set_experts_implementation("eager")
    checkpoint = open_checkpoint(folder, max_context=64)
    export_model(checkpoint.load(), path)
    assert keep_blocks(path, folder, checkpoint.packed, untold) == num_products
    check_parity(
        plain, path, checkpoint.model_config, max_gamma=3, bound=within(1e-4), exact_blocks=True
    )


def test_a_packed_weight_beside_one_that_is_not_is_refused_by_name(tmp_path: Path):
    write_llama(tmp_path / "packed", num_layers=1, hidden_size=64, seed=3)
    pack_folder(tmp_path / "packed", Packing(method="awq"), "q_proj")
    checkpoint = open_checkpoint(tmp_path / "packed", max_context=64)
    path = tmp_path / "target" / "model.onnx"
    export_model(checkpoint.load(), path)
    words = r"packed: model\.layers\.0\.self_attn\.q_proj is packed, but no product .* --weights float32"
    with pytest.raises(BundleError, match=words):
        keep_blocks(path, checkpoint.path, checkpoint.packed, untold)


def test_other_weights_than_the_checkpoints_are_refused_but_float32(tmp_path: Path):
    folder, _ = written(tmp_path, PACKINGS["gptq"])
    fixed = {"target": folder, "draft": None, "out": tmp_path / "bundle"}
    with pytest.raises(BundleError, match="would be rounded again as int8"):
        rounded = ExportOptions(weights="int8", max_context=64)
        export_bundle(**fixed, options=rounded, progress=pytest.fail)
    exact = ExportOptions(weights="float32", max_context=64, max_tree_nodes=0)
    bundle = export_bundle(**fixed, options=exact, progress=lambda _: None)
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
            options=ExportOptions(max_context=64),
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
