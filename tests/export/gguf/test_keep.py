"""Exports of GGUF files: their blocks are kept as they are, and answer as PyTorch does with the file's values."""

import json
import re
import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from outrider.engines.base import BundleError
from outrider.export.certificate.certify import certify_bundle
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.checkpoint import open_checkpoint
from outrider.export.gguf.folder import write_folder
from outrider.export.pipeline import ExportOptions, export_bundle
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.export.gguf.gguf_models import write_gguf
from tests.export.gguf.test_file import MOST_MIB, MOST_S, memory_mib, mutated
from tests.export.test_families import assert_bits_depend_on_no_neighbour
from tests.gate import few_of

SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# By model: its type, whether it is tied, types by parts of names, and how many products with blocks it has.
MIXTURES = {
    "types of 256": (
        "llama",
        True,
        {
            "q_proj": "Q4_K",
            "k_proj": "Q4_K",
            "v_proj": "Q6_K",
            "o_proj": "Q5_K",
            "gate_proj": "Q3_K",
            "up_proj": "Q6_K",
            "down_proj": "Q4_K",
            "embed": "Q4_K",
        },
        7,
    ),
    "types of 32, a head that shares": (
        "qwen2",
        True,
        {
            "q_proj": "Q4_1",
            "k_proj": "Q4_1",
            "v_proj": "Q8_0",
            "o_proj": "Q4_0",
            "gate_proj": "Q5_0",
            "up_proj": "Q8_0",
            "down_proj": "Q5_1",
            "embed": "Q8_0",
        },
        6,
    ),
    "two roundings of one embedding": (
        "qwen3",
        False,
        {"proj": "Q4_0", "embed": "Q5_0", "lm_head": "Q8_0"},
        5,
    ),
}
OPTIONS = ExportOptions(max_context=64, max_tree_nodes=8, max_gamma=4)


def random_model(model_type: str, is_tied: bool) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        model_type, **SIZES, tie_word_embeddings=is_tied, initializer_range=0.05
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def of_blocks(model: PreTrainedModel, drawn: dict[str, np.ndarray]) -> PreTrainedModel:
    """The model with the values of blocks instead of its own."""
    state = model.state_dict() | {name: torch.from_numpy(one) for name, one in drawn.items()}
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "name", few_of(MIXTURES, "types of 256", "types of 32, a head that shares")
)
def test_kept_blocks_answer_as_pytorch_with_the_values_of_the_file(tmp_path: Path, name: str):
    model_type, is_tied, kinds, num_products = MIXTURES[name]
    model, file = random_model(model_type, is_tied), tmp_path / "model.gguf"
    drawn = write_gguf(model, file, kinds)
    told = []
    bundle = export_bundle(
        target=file, draft=None, out=tmp_path / "bundle", options=OPTIONS, progress=told.append
    )
    assert not list(tmp_path.glob(".gguf-*"))
    assert "target: reading model.gguf" in told
    manifest = bundle.manifest
    assert manifest.target.weights == "gguf"
    assert manifest.sources["target"].startswith("model.gguf@sha256:")
    path = bundle.root / "target" / "model.onnx"
    graph = ir.load(path).graph
    products = [node for node in graph if node.op_type == "DequantizeLinear"]
    assert len(products) == num_products
    # No matrix is stored as float32: scales, minimums and norms are a fraction of the integers.
    whole = sum(one.size for one in drawn.values()) * 4
    assert path.with_name("model.onnx.data").stat().st_size < 0.55 * whole
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(file, folder)
    model_config = open_checkpoint(folder, max_context=64).model_config
    tokens = torch.randint(0, 96, (2, 24), generator=torch.manual_seed(1))
    with torch.no_grad():
        expected = of_blocks(model, drawn)(input_ids=tokens).logits.numpy()
    # As served, activations have 8 bits.
    served = manifest.certificate["target"]["gguf"]["grouped"]["verify"]["max_difference"]
    assert 0 < served < 0.1 * np.abs(expected).max()
    runner = GraphRunner(path, model_config, batch=2, capacity=64, exact_blocks=True)
    answered = runner.extend(tokens.numpy(), np.zeros(2, np.int64))
    assert np.abs(answered - expected).max() < 3e-6 * np.abs(expected).max()
    for one in (path, path.with_name("grouped.onnx")):
        assert_bits_depend_on_no_neighbour(one, model_config)
    certify_bundle(bundle, {"target": folder})


def test_weights_of_a_file_may_be_asked_for_otherwise(tmp_path: Path):
    model, file = random_model("qwen2", True), tmp_path / "model.gguf"
    drawn = write_gguf(model, file, {"proj": "Q2_K", "embed": "Q6_K"})
    with pytest.raises(BundleError, match=r"type Q2_K is not kept.*--weights int8"):
        export_bundle(
            target=file, draft=None, out=tmp_path / "kept", options=OPTIONS, progress=lambda _: None
        )
    options = ExportOptions(weights="float32", max_context=64, max_tree_nodes=0, max_gamma=4)
    bundle = export_bundle(
        target=file, draft=None, out=tmp_path / "b", options=options, progress=lambda _: None
    )
    assert bundle.manifest.target.weights == "float32"
    data = (bundle.root / "target" / "model.onnx.data").stat().st_size
    assert data > 4 * sum(one.size for one in drawn.values())


def test_parts_of_a_model_are_one_file(tmp_path: Path):
    model = random_model("qwen2", False)
    write_gguf(model, tmp_path / "whole.gguf")
    read = gguf.GGUFReader(tmp_path / "whole.gguf")
    half = len(read.tensors) // 2
    names = [f"model-0000{part}-of-00002.gguf" for part in (1, 2)]
    for name, tensors in zip(names, (read.tensors[:half], read.tensors[half:]), strict=True):
        writer = gguf.GGUFWriter(tmp_path / name, "qwen2")
        if name == names[0]:
            copy_pairs(read, writer)
        for one in tensors:
            writer.add_tensor(one.name, np.array(one.data), raw_dtype=Kind(one.tensor_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(tmp_path / names[1], folder)
    found = open_checkpoint(folder, max_context=64).load().state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(found[key], tensor), key
    (tmp_path / names[1]).unlink()
    with pytest.raises(BundleError, match=r"00002-of-00002\.gguf: no such file"):
        write_folder(tmp_path / names[0], folder)


def copy_pairs(read: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in read.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), kind, inner)


def changed(tmp_path: Path, pairs: dict[str, object], tensors: dict[str, str | None]) -> Path:
    """A file of a small model with other metadata, or with tensors of another name or type."""
    model, whole = random_model("llama", True), tmp_path / "whole.gguf"
    write_gguf(model, whole)
    read = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(tmp_path / "changed.gguf", str(pairs.pop("architecture", "llama")))
    for name in pairs:
        read.fields.pop(name, None)
    copy_pairs(read, writer)
    for name, value in pairs.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, float(value))
    for one in read.tensors:
        name = tensors.get(one.name, one.name)
        if name is not None:
            writer.add_tensor(name, np.array(one.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "changed.gguf"


REFUSED = {
    "another architecture": ({"architecture": "mamba"}, {}, "'mamba' is not read; llama, qwen2"),
    "experts": ({"llama.expert_count": 8}, {}, "layers of experts"),
    "half a layer": ({"llama.block_count": 1.5}, {}, "whole number above 0"),
    "a size in words": ({"llama.embedding_length": "many"}, {}, "must be one number"),
    "scaled positions": ({"llama.rope.scaling.type": "ntk"}, {}, "'ntk' are not read"),
    "a tensor too many": (
        {},
        {"blk.0.attn_q.weight": "blk.0.attn_r.weight"},
        "'blk.0.attn_r.weight' is no tensor of llama",
    ),
    "no embedding": ({}, {"token_embd.weight": None}, "token_embd.weight must be a matrix"),
    "a weight too few": ({}, {"blk.0.ffn_up.weight": None}, "mlp.up_proj.weight"),
    "another size": ({"llama.feed_forward_length": 256}, {}, "is stored as"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_read_is_refused_in_one_line(tmp_path: Path, name: str):
    pairs, tensors, words = REFUSED[name]
    file, folder = changed(tmp_path, dict(pairs), tensors), tmp_path / "changed"
    folder.mkdir()
    with pytest.raises(BundleError, match=words) as refused:
        write_folder(file, folder)
        open_checkpoint(folder, max_context=64).load()
    assert "\n" not in str(refused.value)


def test_types_that_are_not_read_are_refused_by_name(tmp_path: Path):
    model, file = random_model("llama", True), tmp_path / "model.gguf"
    write_gguf(model, file, {"down_proj": "Q8_0"})
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16
    assert data[at] == Kind.Q8_0
    data[at] = Kind.IQ4_NL  # smaller, of the same blocks
    file.write_bytes(data)
    with pytest.raises(BundleError, match="of type IQ4_NL is not read"):
        write_folder(file, tmp_path)


def test_llama_3_scales_angles_by_the_factors_of_the_file(tmp_path: Path):
    torch.manual_seed(7)
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model(
        "llama", **(SIZES | {"max_position_embeddings": 16_384}), rope_parameters=scaled
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write_gguf(model, file, factors=factors)
    folder.mkdir()
    write_folder(file, folder)
    found = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert found == scaled


@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_a_mutated_model_becomes_a_folder_or_is_refused_in_one_line(tmp_path: Path, count: int):
    model, file = random_model("llama", True), tmp_path / "model.gguf"
    write_gguf(model, file, {"proj": "Q4_0", "embed": "Q8_0"})
    whole = file.read_bytes()
    generator, num_refused, before = np.random.default_rng(5), 0, memory_mib()
    # What configuration and tokenizer are read from lies in front of the data.
    head = whole.index(b"blk.0.ffn_down.weight") + 200
    for number in range(count):
        file.write_bytes(mutated(whole[:head], generator) + whole[head:])
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = time.perf_counter()
        try:
            write_folder(file, folder)
        except BundleError as error:
            num_refused += 1
            assert re.fullmatch(r"model\.gguf: [^\n]{1,400}", str(error))
        assert time.perf_counter() - begin < MOST_S
        shutil.rmtree(folder)
    assert count / 4 < num_refused < count
    assert memory_mib() - before < MOST_MIB
