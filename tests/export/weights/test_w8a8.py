"""Products behind norms from 8-bit integers: what they cost, what they leave alone, and on what text."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from outrider.engines.base import BundleError, FloatArray
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.opening import open_engine
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.reference import reference_logits
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from outrider.export.weights import w8a8 as static
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.written_text import WrittenText, observe, write_text
from transformers import PreTrainedModel

from scripts.check_parity import random_model
from tests.engines.contract import check_copies, make_tokens
from tests.export.weights.integer_sums import overflow

V = 131
SIZES = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FAMILIES = {
    "llama": SIZES,
    # Products that read a norm through Reshape, and others that are Gemm nodes, with biases.
    "gpt2": {"n_embd": 64, "n_inner": 96, "vocab_size": V},
    "opt": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Two layers; the norms' channels differ a hundredfold, as those of trained models do."""
    model = random_model(request.param, num_positions=96, **FAMILIES[request.param])
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and ("norm" in name or "ln_" in name):
            parameter.data *= 10 ** (2 * torch.rand(parameter.shape, generator=generator) - 1)
    return model


@pytest.fixture(scope="module")
def exported(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_model(model, folder / "model.onnx")
    return folder


@pytest.fixture
def path(exported: Path, tmp_path: Path) -> Path:
    """A copy of the model's graph, free to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "target")) / "model.onnx"


def test_text_is_what_the_model_would_write(model: PreTrainedModel, path: Path) -> None:
    """Each token wins by PyTorch's logits and the same noise, and another seed writes other text."""
    model_config = read_model_config(model.config)
    tokens = write_text(path, model_config, seed=4).tokens
    assert tokens.shape == (16, 96)
    generator = np.random.default_rng(4)
    np.testing.assert_array_equal(tokens[:, 0], generator.integers(0, V, 16))
    logits = reference_logits(model, tokens)
    for place in range(1, 96):
        scores = logits[:, place - 1] + generator.gumbel(size=(16, V))
        np.testing.assert_array_equal(tokens[:, place], scores.argmax(-1))
    assert (write_text(path, model_config, seed=5).tokens != tokens).mean() > 0.5


def test_what_is_observed_is_what_the_checkpoint_computes(
    model: PreTrainedModel, path: Path
) -> None:
    tokens = np.random.default_rng(1).integers(0, V, (3, 11))
    names = [found.name for found in static.normed_products(split(path).graph)]
    seen: list[FloatArray] = []
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and (".layers." in name or ".h." in name):
            module.register_forward_hook(
                lambda module, given, found: seen.append(
                    found.detach().reshape(-1, 64).clone().numpy()
                )
            )
    reference_logits(model, tokens)
    found = observe(path, read_model_config(model.config), names, WrittenText(tokens))
    assert [*found] == names
    assert len(names) == len(seen) == 4
    for name, expected in zip(names, seen, strict=True):
        np.testing.assert_allclose(found[name], expected, atol=2e-4)
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_8_bit_activations_cost_little_more_than_8_bit_weights(
    model: PreTrainedModel, path: Path
) -> None:
    model_config = read_model_config(model.config)
    tokens = np.random.default_rng(0).integers(0, V, (3, 40))
    expected = reference_logits(model, tokens)
    blocks = Path(shutil.copytree(path.parent, path.parent.with_name("blocks"))) / path.name
    quantize_file(blocks, "int8")
    assert static.quantize_static(path, model_config) == 4
    errors = [
        (
            GraphRunner(one, model_config, batch=3, capacity=40).extend(
                tokens, np.zeros(3, np.int64)
            )
            - expected
        ).std()
        for one in (blocks, path)
    ]
    # 2.2 where sums overflow.
    assert 1e-3 < errors[1] < (3 if overflow() else 2) * errors[0]


def test_rows_stay_independent(model: PreTrainedModel, path: Path) -> None:
    model_config = read_model_config(model.config)
    static.quantize_static(path, model_config)
    text = np.random.default_rng(5).integers(0, V, (5, 40))
    wide = GraphRunner(path, model_config, batch=5, capacity=48)
    expected = wide.extend(text, np.zeros(5, np.int64))
    for batch in (1, 2, 5):
        runner = GraphRunner(path, model_config, batch=batch, capacity=48)
        for at in range(0, 40, 4):
            found = runner.extend(text[:batch, at : at + 4], np.full(batch, at))
            np.testing.assert_array_equal(found, expected[:batch, at : at + 4])


def test_evening_changes_no_product() -> None:
    """What is taken from a norm's channels is given to the rows of the weights."""
    rng = np.random.default_rng(2)
    spread = 10 ** rng.uniform(-2, 2, 48)
    given = (rng.normal(size=(200, 48)) * spread).astype(np.float32)
    weights = tuple(rng.normal(size=(48, n)).astype(np.float32) for n in (5, 9))
    factors = static.evening_factors(given, weights)
    evened = np.abs(given / factors).max(axis=0)
    heights = np.abs(np.hstack(weights) * factors[:, None]).max(axis=1)
    np.testing.assert_allclose(evened, heights, rtol=1e-5)
    ranges = np.abs(given).max(axis=0)
    assert evened.max() / evened.min() < 2 * np.sqrt(ranges.max() / ranges.min())


def test_products_that_would_change_much_are_left_alone(
    model: PreTrainedModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of very different sizes, as a gate puts them out, have no scale in common."""
    rng = np.random.default_rng(8)
    heavy = (rng.normal(size=(512, 64)) * 10 ** rng.uniform(-1.5, 1.5, (512, 1))).astype(np.float32)
    even = rng.normal(size=(512, 64)).astype(np.float32)
    quantised = split(path)
    first, *others = [found.name for found in static.normed_products(quantised.graph)]
    count = static.quantize_products(quantised.graph, {first: heavy} | dict.fromkeys(others, even))
    assert count == 3
    read = [node.inputs[0].name for node in quantised.graph if node.op_type == "QuantizeLinear"]
    assert len(read) == 3
    assert first not in read
    monkeypatch.setattr(static, "MOST_ERROR", 1e-4)
    with pytest.raises(BundleError, match=r"target/model.onnx: no product takes 8-bit act.*int8"):
        static.quantize_static(path, read_model_config(model.config))


def test_a_product_that_is_always_zero_stays_so(model: PreTrainedModel, path: Path) -> None:
    """As of blocks that a model was widened or deepened by."""
    quantised = split(path)
    found = list(static.normed_products(quantised.graph))
    nothing = np.zeros((64, 64), np.float32)
    assert static.quantize_products(quantised.graph, {one.name: nothing for one in found}) == 4
    scales = [
        value.const_value.numpy()
        for name, value in quantised.graph.initializers.items()
        if name.endswith(".scale") and value.const_value is not None
    ]
    assert len(scales) == 8
    assert all(np.isfinite(scale).all() and (scale > 0).all() for scale in scales)


def test_a_norm_that_others_read_too_is_left_alone(model: PreTrainedModel, path: Path) -> None:
    quantised = split(path)
    first, *others = list(static.normed_products(quantised.graph))
    extra = ir.node("Neg", [first.norm.outputs[0]])
    quantised.graph.insert_after(first.norm, extra)
    assert [found.name for found in static.normed_products(quantised.graph)] == [
        found.name for found in others
    ]


def test_products_reach_the_integer_kernel(
    model: PreTrainedModel, path: Path, optimised_graph: Callable[[Path], onnx.GraphProto]
) -> None:
    count = static.quantize_static(path, read_model_config(model.config))
    operators = [node.op_type for node in optimised_graph(path).node]
    assert operators.count("MatMulIntegerToFloat") == operators.count("QuantizeLinear") == count
    assert "DequantizeLinear" not in operators


def test_a_bundle_says_what_8_bit_activations_cost(export_small: Callable[..., Bundle]) -> None:
    stages: list[str] = []
    bundle = export_small(weights="w8a8", progress=stages.append)
    assert bundle.manifest.target.weights == "w8a8"
    certificate = bundle.manifest.certificate["target"]
    assert isinstance(certificate, dict)
    assert 1e-4 < certificate["w8a8"]["prefill"]["max_difference"] < 10
    assert any("products take 8-bit activations" in stage for stage in stages)
    engine = open_engine(bundle, "target")
    check_copies(engine, make_tokens(engine, 24, seed=1))


def split(path: Path) -> ir.Model:
    """The graph as it is quantised, its Gemm nodes taken apart."""
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    static.split_gemms(model.graph)
    return model
