"""Checkpoints of 16 bits: the bits of their bundles are those of a float32 load, and their weights stay in files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import DEVICE_FILE, GROUPED_FILE
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.export.certificate import graph_runner
from outrider.export.certificate.certify import certify
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.weights import mapped
from outrider.export.weights.half_weights import store_halves
from outrider.export.weights.mapped import StandIns, is_mapped, widened
from outrider.export.weights.widened import load_widened, save_over
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.check_parity import random_model
from tests.conftest import write_tokenizer
from tests.export.certificate.bounds import within
from tests.export.text2text_models import pytorch_logits, random_text2text

# Every matrix has more elements than the exporter computes with.
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
TOKENS = np.random.default_rng(0).integers(0, 512, (3, 11))


@pytest.fixture(scope="module", params=["llama-float16", "gemma3_text-bfloat16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory) -> Checkpoint:
    family, dtype = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(family, num_positions=128, **SIZES)
    # In several files, as large checkpoints are.
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="200KB")
    write_tokenizer(folder)
    return open_checkpoint(folder, max_context=96)


@pytest.fixture(scope="module")
def wide(checkpoint: Checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()


def test_weights_lie_in_the_files_of_the_checkpoint(checkpoint: Checkpoint) -> None:
    model = checkpoint.load()
    assert is_mapped(model)
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(checkpoint.path) in line
    ]
    for parameter in model.parameters():
        assert any(first <= parameter.data_ptr() < end for first, end in spans)
    assert all(buffer.dtype is torch.float32 for buffer in model.buffers())


def test_the_reference_is_that_of_a_float32_load(
    checkpoint: Checkpoint, wide: PreTrainedModel
) -> None:
    model = checkpoint.load()
    found, expected = Reference(model), Reference(wide)
    np.testing.assert_array_equal(found.logits(TOKENS).values, expected.logits(TOKENS).values)
    row, parents = TOKENS[0].tolist(), (0, 1, 0)
    np.testing.assert_array_equal(
        found.tree(row, parents).values, expected.tree(row, parents).values
    )
    assert is_mapped(model)  # nothing stays widened


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_model_with_an_encoder_answers_as_a_float32_load(family: str, tmp_path: Path) -> None:
    checkpoint = text2text_checkpoint(family, tmp_path)
    model = checkpoint.load()
    assert is_mapped(model)
    sources, lengths = TOKENS % 96, np.array([11, 4, 1])
    with widened(model):
        found = pytorch_logits(model, sources, lengths, sources)
    expected = pytorch_logits(checkpoint.load_as(torch.float32), sources, lengths, sources)
    np.testing.assert_array_equal(found, expected)
    assert is_mapped(model)


@pytest.mark.long
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_mapped_model_with_an_encoder_makes_the_graphs_of_a_float32_load(
    family: str, tmp_path: Path
) -> None:
    checkpoint = text2text_checkpoint(family, tmp_path, d_model=128, vocab_size=512)
    found, expected = tmp_path / "found", tmp_path / "expected"
    models = {found: checkpoint.load(), expected: checkpoint.load_as(torch.float32)}
    for folder, model in models.items():
        export_model(model, folder / "model.onnx", num_positions=100, num_source_positions=100)
    assert {path.name for path in found.iterdir()} > {"encode.onnx", "encode.onnx.data"}
    for path in found.iterdir():
        assert path.read_bytes() == (expected / path.name).read_bytes()


def text2text_checkpoint(family: str, folder: Path, **sizes: int) -> Checkpoint:
    random_text2text(family, **sizes).bfloat16().save_pretrained(folder)
    return open_checkpoint(folder, max_context=96)


def test_a_reference_answers_again_without_its_model(wide: PreTrainedModel) -> None:
    loaded: list[PreTrainedModel] = []

    def load() -> PreTrainedModel:
        loaded.append(wide)
        return wide

    reference = Reference(wide, load)
    expected = reference.logits(TOKENS)
    reference.release()
    assert reference.logits(TOKENS.copy()) is expected
    assert not loaded
    # What nobody has asked for yet needs the model again.
    assert reference.logits(TOKENS[:, 1:]).values.shape[:2] == (3, 10)
    assert loaded == [wide]


@pytest.fixture(scope="module")
def graphs(checkpoint: Checkpoint, wide: PreTrainedModel, tmp_path_factory) -> tuple[Path, Path]:
    """Graphs of the mapped model, which keeps its 16 bits, and of the float32 one."""
    kept, plain = (tmp_path_factory.mktemp(name) / "model.onnx" for name in ("kept", "plain"))
    export_model(checkpoint.load(), kept, num_positions=128, keeps_halves=True)
    export_model(wide, plain, num_positions=128)
    return kept, plain


def bits(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), path.with_name("model.onnx.data").read_bytes()


def copied(path: Path, folder: Path) -> Path:
    for name, content in zip(("model.onnx", "model.onnx.data"), bits(path), strict=True):
        (folder / name).write_bytes(content)
    return folder / "model.onnx"


def test_a_graph_that_kept_16_bits_is_the_float32_graph_again(
    graphs: tuple[Path, Path], tmp_path: Path
) -> None:
    kept, plain = graphs
    # Keys, 8,192 elements here, and what is joined with them are float32.
    assert len(bits(kept)[1]) < 0.75 * len(bits(plain)[1])
    again = copied(kept, tmp_path)
    save_over(load_widened(again), again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert bits(again) == bits(plain)


def test_a_mapped_model_makes_the_float32_graph_of_a_float32_load(
    checkpoint: Checkpoint, graphs: tuple[Path, Path], tmp_path: Path
) -> None:
    model = checkpoint.load()
    export_model(model, tmp_path / "model.onnx", num_positions=128)
    assert bits(tmp_path / "model.onnx") == bits(graphs[1])
    assert is_mapped(model)


def test_large_weights_stay_in_their_file_while_graphs_are_certified(
    checkpoint: Checkpoint,
    wide: PreTrainedModel,
    graphs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = copied(graphs[0], tmp_path)
    store_halves(path, "float16")
    derive_grouped_graph(path)
    derive_device_graphs(path, "float16", with_trees=False)
    opened: list[bool] = []
    open_session = graph_runner.open_session

    def note(path: Path, **options: bool) -> object:
        opened.append(options["weights"].are_mapped)
        return open_session(path, **options)

    monkeypatch.setattr(graph_runner, "open_session", note)
    monkeypatch.setattr(graph_runner, "_MOST_WIDENED_BYTES", 0)
    limits = {"max_gamma": 4, "max_tree_nodes": 0, "bound": within(0.25)}
    found = certify(wide, path, checkpoint.model_config, **limits)
    assert opened == [True] * 3
    assert {GROUPED_FILE, DEVICE_FILE} == {f"{name}.onnx" for name in ("grouped", "device")}
    assert 0 < found["device"]["rollback"]["max_difference"] < 0.25
    monkeypatch.undo()
    served = certify(wide, path, checkpoint.model_config, **limits)
    for name in ("prefill", "ragged", "rollback"):
        difference = found[name]["max_difference"] - served[name]["max_difference"]
        assert abs(difference) < 1e-4


def test_an_exporter_that_computes_with_weights_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Vectors too: what follows from their stand-ins is no number.
    monkeypatch.setattr(mapped, "_MOST_FOLDED", 0)
    model = checkpoint.load()
    stand_ins = StandIns()
    with stand_ins.inside(model):
        stood = next(model.parameters())
        assert stood.isnan().all()
        folded = ir.tensor((stood[:2, :2] * 2).numpy(), name="folded")
    value = ir.Value(name="folded", const_value=folded, type=ir.TensorType(folded.dtype))
    graph = ir.Graph([], [], nodes=[], initializers=[value], name="graph")
    with pytest.raises(BundleError, match="folded: computed from weights"):
        stand_ins.give_way(graph)


def test_a_checkpoint_of_mixed_types_is_loaded_as_float32(tmp_path: Path) -> None:
    model = random_model("llama", num_positions=128, **SIZES).half()
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert not is_mapped(open_checkpoint(tmp_path, max_context=96).load())


def test_a_bundle_of_another_kind_is_made_from_16_bits(
    checkpoint: Checkpoint, export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    kind = {"float16": "int4", "bfloat16": "float16"}[checkpoint.half_precision()]
    small = {"target": checkpoint.path, "max_context": 64, "max_tree_nodes": 8}
    bundle = export_small(**small, weights=kind, out=tmp_path / kind)
    stored = ir.load(bundle.model_path(bundle.manifest.target)).graph.initializers.values()
    assert not [value.name for value in stored if value.name.endswith(".kept")]
    certificate = bundle.manifest.certificate["target"]
    assert certificate["rollback"]["max_difference"] <= 1e-4
    assert certificate[kind]["rollback"]["num_compared"] > 0
