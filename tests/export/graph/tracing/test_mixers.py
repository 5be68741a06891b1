"""Layers that keep a recurrent state: PyTorch's answers, whatever was rejected, in the bits of each token alone."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree

import numpy as np
import onnx
import pytest
import torch
from outrider import LLM, SamplingParams
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.names import GROUPED_FILE, MODEL_FILE
from outrider.engines.bundle.states import STATES
from outrider.engines.onnx.session import open_session
from outrider.export.accelerators.tensorrt.parts import plan_parts
from outrider.export.certificate import slot_places
from outrider.export.certificate.certify import certify_bundle
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity import check_parity, float32_bound
from outrider.export.certificate.reference import Reference, reference_logits
from outrider.export.checkpoint import open_checkpoint
from outrider.export.context import default_context
from outrider.export.graph.to_onnx import _trace, export_model
from outrider.export.graph.tracing import mixers
from outrider.export.graph.tracing.mixers import Mixers, UnsupportedMixerError
from outrider.export.graph.tracing.probe import mixer_sizes
from outrider.export.graph.tracing.signatures import Signature
from outrider.export.model_config import LayerKinds, ModelConfig, read_model_config
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.mapped import is_mapped
from outrider.export.weights.w8a8 import quantize_static
from transformers import DynamicCache, PreTrainedModel

from tests.conftest import write_tokenizer
from tests.export.graph.hybrid_models import FAMILIES, random_hybrid, write_hybrid
from tests.export.graph.untraced import UntracedSession, run_untraced
from tests.export.weights.packed_models import Packing, pack_folder
from tests.gate import few_of
from tests.mutants import put_in

MAX_GAMMA = 4
NUM_POSITIONS = 128
# No width is a multiple of what kernels compute at once; taps, and heads of queries, that differ from those of values.
ODD: dict[str, dict[str, object]] = {
    "lfm2": {"hidden_size": 72, "head_dim": 18, "conv_L_cache": 4, "conv_bias": True},
    "qwen3_5_text": {"linear_key_head_dim": 20, "linear_value_head_dim": 7, "hidden_size": 72},
    "falcon_h1": {"hidden_size": 72, "mamba_d_state": 10},
}
few = few_of(FAMILIES, "lfm2", "qwen3_5_text", "granitemoehybrid")


def exported(
    family: str, folder: Path, **sizes: object
) -> tuple[PreTrainedModel, Path, ModelConfig]:
    model = random_hybrid(family, **sizes)
    path = folder / MODEL_FILE
    export_model(model, path, num_positions=NUM_POSITIONS, max_open=MAX_GAMMA)
    return model, path, read_model_config(model.config)


@pytest.fixture(scope="module")
def once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[PreTrainedModel, Path, ModelConfig]]:
    """Models with their graphs by family, which no test changes."""
    return cache(lambda family: exported(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def copied(
    once: Callable[[str], tuple[PreTrainedModel, Path, ModelConfig]], tmp_path: Path
) -> Callable[[str], tuple[Path, ModelConfig]]:
    """Copies of their graphs, to be changed."""

    def copy(family: str) -> tuple[Path, ModelConfig]:
        _, path, model_config = once(family)
        return copytree(path.parent, tmp_path / family) / path.name, model_config

    return copy


def check(model: PreTrainedModel, path: Path, model_config: ModelConfig) -> None:
    """The certificate's cases, with drafts rejected at every place."""
    reference = Reference(model)
    bound = float32_bound(reference, model_config, max_gamma=MAX_GAMMA)
    found = check_parity(reference, path, model_config, max_gamma=MAX_GAMMA, bound=bound)
    assert found["rejections"]["num_compared"] == 2 * 3 * 4
    assert found["drafting"]["num_compared"] == 3 * (MAX_GAMMA + 4)


@pytest.mark.parametrize("family", few)
def test_a_family_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    model, path, model_config = exported(family, tmp_path, **ODD.get(family, {}))
    check(model, path, model_config)
    assert model.config._attn_implementation != "outrider_kv"
    assert_bits_are_those_of_tokens_alone(path, model_config)


@pytest.mark.parametrize("family", few)
@pytest.mark.parametrize("weights", ["int8", "int4", "w8a8"])
def test_integer_weights_keep_bits(
    family: str, weights: str, copied: Callable[[str], tuple[Path, ModelConfig]]
) -> None:
    path, model_config = copied(family)
    if (weights, family) == ("w8a8", "minimax"):  # its residuals read norms too
        with pytest.raises(BundleError, match="no product takes 8-bit activations"):
            quantize_static(path, model_config)
    elif weights == "w8a8":
        quantize_static(path, model_config)
    else:
        quantize_file(path, weights)
    assert_bits_are_those_of_tokens_alone(path, model_config)


def assert_bits_are_those_of_tokens_alone(path: Path, model_config: ModelConfig) -> None:
    """Three rows of which drafts are rejected at random places, against each token in a call of one row.

    The rows had other texts before: nothing of those may be seen.
    """
    rng = np.random.default_rng(0)
    batch, length = 3, 40
    texts = rng.integers(0, model_config.vocab_size, (batch, length))
    runner = GraphRunner(path, model_config, batch=batch, capacity=64)
    runner.extend(rng.integers(0, model_config.vocab_size, (batch, 9)), np.zeros(batch, np.int64))
    settled = np.array([7, 5, 6])
    prefill = runner.extend(texts[:, :7], np.zeros(batch, np.int64), settled)
    found = [list(row[:count]) for row, count in zip(prefill, settled, strict=True)]
    ends = settled.copy()
    while ends.max() < length - MAX_GAMMA - 1:
        accepted = rng.integers(0, MAX_GAMMA + 1, batch)
        spans = rng.integers(0, model_config.vocab_size, (batch, MAX_GAMMA + 1))
        for row, (end, count) in enumerate(zip(ends, accepted, strict=True)):
            spans[row, : 1 + count] = texts[row, end : end + 1 + count]
        logits = runner.extend(spans, ends, np.ones(batch, np.int64))
        for row, count in enumerate(accepted):
            found[row] += list(logits[row, : 1 + count])
        ends = ends + 1 + accepted
    for row, logits in enumerate(found):
        expected = one_by_one(path, model_config, texts[row, : ends[row] + 1])
        np.testing.assert_array_equal(np.stack(logits), expected)


def one_by_one(path: Path, model_config: ModelConfig, text: IntArray) -> FloatArray:
    """Logits of all tokens of a text but the last, each in a call of its own beside a token that is rejected."""
    runner = GraphRunner(path, model_config, batch=1, capacity=64)
    one = np.ones(1, np.int64)
    calls = [
        runner.extend(text[None, at : at + 2], one * at, one)[0, 0] for at in range(len(text) - 1)
    ]
    return np.stack(calls)


def test_gates_of_a_delta_rule_stay_float32(
    copied: Callable[[str], tuple[Path, ModelConfig]],
) -> None:
    """They are joined with each other alone, so that a packed checkpoint's projections are found again."""
    path, _ = copied("qwen3_5_text")
    gates = (64, 2 * 4)
    assert_num_products(path, gates, 2)
    assert quantize_file(path, "int8") == 13
    assert_num_products(path, gates, 2)


def assert_num_products(path: Path, shape: tuple[int, int], count: int) -> None:
    graph = onnx.load(path, load_external_data=False).graph
    weights = {one.name for one in graph.initializer if tuple(one.dims) == shape}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    assert sum(node.input[1] in weights for node in products) == count


def test_the_reference_of_a_delta_rule_goes_token_by_token() -> None:
    """In one pass, and with the logits of PyTorch's own cache; afterwards in chunks again."""
    model = random_hybrid("qwen3_5_text")
    module = sys.modules[type(model).__module__]
    chunked = module.torch_chunk_gated_delta_rule
    texts = np.random.default_rng(0).integers(0, 512, (2, 40))
    found = Reference(model).logits(texts)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [
            model(input_ids=token, past_key_values=past, use_cache=True).logits
            for token in torch.from_numpy(texts).split(1, dim=1)
        ]
    expected = torch.cat(steps, 1).numpy()
    assert np.abs(found.values - expected).max() < 2 * found.rounding
    assert not np.array_equal(found.values, reference_logits(model, texts))
    assert module.torch_chunk_gated_delta_rule is chunked


def test_a_checkpoint_in_16_bits_convolves_in_float32(tmp_path: Path) -> None:
    """Its weights stay in their file, and taps are read by the layer, not by the module that has them."""
    random_hybrid("lfm2", hidden_size=128).to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, max_context=NUM_POSITIONS)
    model = checkpoint.load()
    assert is_mapped(model)
    texts = np.random.default_rng(0).integers(0, 512, (2, 40))
    expected = reference_logits(checkpoint.load_as(torch.float32), texts)
    assert np.array_equal(Reference(model).logits(texts).values, expected)


def test_what_16_bits_hold_of_a_block_says_nothing_of_the_rule(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    """MiniMax's checkpoints have its decay, and factors made of it, each rounded by itself."""
    random_hybrid("minimax").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    write_tokenizer(tmp_path / "target")
    bundle = export_small(target=tmp_path / "target", max_gamma=2)
    certificate = bundle.manifest.certificate["target"]
    assert isinstance(certificate, dict) and certificate["tolerance"] < 1e-3


def test_a_packed_checkpoint_keeps_its_blocks(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    """Gates are in no block, as in published ones."""
    write_hybrid("qwen3_5_text", tmp_path)
    drawn = pack_folder(tmp_path, Packing(method="gptq"), "proj")
    assert not [name for name in drawn if name.endswith(("proj_a", "proj_b"))]
    bundle = export_small(target=tmp_path, max_gamma=2)
    certificate = bundle.manifest.certificate["target"]
    assert isinstance(certificate, dict) and certificate["kept_blocks"]["rejections"]
    assert bundle.manifest.target.weights == "gptq-int4"


# Mistakes of what is traced: each must differ from PyTorch beyond the bound, where it is not refused before.
MISTAKES: dict[str, tuple[str, str, str]] = {
    "drafts move the state": (
        "qwen3_5_text",
        "second, _ = scan(open_, kept.states[number])",
        "second, kept.states[number] = scan(open_, kept.states[number])",
    ),
    "drafts are scanned from the former state": (
        "qwen3_5_text",
        "first, kept.states[number] = scan(settled, kept.states[number])\n"
        "        second, _ = scan(open_, kept.states[number])",
        "second, _ = scan(open_, kept.states[number])\n"
        "        first, kept.states[number] = scan(settled, kept.states[number])",
    ),
    "pending rows are kept as they were": (
        "qwen3_5_text",
        "functional.embedding(pending_rows, pool)",
        "kept.pending[number] * 1.0",
    ),
    "queries and keys keep their length": (
        "qwen3_5_text",
        "if use_qk_l2norm_in_kernel:",
        "if False:",
    ),
    "the delta rule's scale is left out": ("qwen3_5_text", "query.shape[-1] ** -0.5", "1.0"),
    "taps in the other order": ("lfm2", "weight.t()[:, None]", "weight.t().flip(0)[:, None]"),
    "a tap is left out": ("lfm2", "range(1, weight.shape[1])", "range(1, weight.shape[1] - 1)"),
    "windows are kept as they were": (
        "lfm2",
        "functional.embedding(window_rows, pool)",
        "kept.windows[number] * 1.0",
    ),
    "no activation behind a convolution": ("falcon_h1", "total * total.sigmoid()", "total"),
    "what passes a scan by is left out": (
        "falcon_h1",
        "answers = answers + passed[:, None] * x",
        "answers = answers + 0.0 * x",
    ),
    "a head's own decay is left out": ("minimax", "-module.slope_rate", "0.0 * module.slope_rate"),
    "a gate's bias is left out": ("kimi_linear", " + module.dt_bias.float()", ""),
    "all keys of a head decay alike": (
        "kimi_linear",
        "decay.flatten(2)]",
        "decay[..., :1].expand(decay.shape).flatten(2)]",
    ),
    "steps are not in the decay": ("falcon_h1", "dt * rates", "rates + 0.0 * dt"),
}


def check_untraced(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_hybrid(family)
    run_untraced(monkeypatch, UntracedSession(model, NUM_POSITIONS, MAX_GAMMA))
    check(model, Path("untraced") / MODEL_FILE, read_model_config(model.config))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_traced_of_a_family_answers_as_pytorch_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_untraced(family, monkeypatch)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_what_is_traced_is_caught(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, old, new = MISTAKES[mistake]
    put_in(monkeypatch, mixers, old, new)
    with pytest.raises(BundleError, match="differs by"):
        check_untraced(family, monkeypatch)


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("lfm2", "window - self._end[:, None]", "window - start[:, None]"),
        ("lfm2", "columns + 1 - self._kernel", "columns - self._kernel"),
        ("qwen3_5_text", "held + new[:count] if count", "new[:count] if count"),
        ("qwen3_5_text", "new[count:] if count else held + new", "new[count:] if count else new"),
        ("qwen3_5_text", "held[is_new] = 0.0", "pass"),
        ("qwen3_5_text", "len(moves[row]) - count", "0 * count"),
    ],
)
def test_a_mistake_of_places_is_caught(
    family: str,
    old: str,
    new: str,
    once: Callable[[str], tuple[PreTrainedModel, Path, ModelConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(*once(family))
    put_in(monkeypatch, slot_places, old, new)
    with pytest.raises(BundleError, match="differs by"):
        check(*once(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_learnt_from_the_calls_of_the_model(family: str) -> None:
    model = random_hybrid(family)
    model_config = read_model_config(model.config)
    found = mixer_sizes(model.config, model_config, MAX_GAMMA)
    assert found is not None
    num_layers, num_mixers, heads, key_size, value_size = {
        "lfm2": (1, 2, 0, 0, 0),
        "falcon_h1": (2, 2, 8, 8, 16),
        "bamba": (1, 2, 8, 8, 16),
        "mamba2": (0, 2, 8, 8, 16),
        "zamba2": (2, 3, 8, 8, 16),
        "granitemoehybrid": (1, 2, 8, 8, 16),
        "nemotron_h": (1, 2, 8, 8, 16),
    }.get(family, (1, 2, 4, 16, 16))
    assert (model_config.num_layers, found.mixers) == (num_layers, num_mixers)
    assert (found.heads, found.key_size, found.value_size) == (heads, key_size, value_size)
    of_all = {
        (*one.kernel_size, one.out_channels)
        for one in model.modules()
        if isinstance(one, torch.nn.Conv1d)
    }
    assert {(found.kernel, found.channels)} == (of_all or {(1, 0)})
    assert found.window == found.kernel - 1 + MAX_GAMMA


def test_a_module_that_computes_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of Transformers may rename what is replaced: a graph without states must not come of it."""
    model = random_hybrid("qwen3_5_text")
    module = sys.modules[type(model).__module__]
    own = Mixers.functions

    def learnt(lost: str) -> None:
        def fewer(self: Mixers) -> dict[str, Callable[..., object]]:
            return {name: one for name, one in own(self).items() if name != lost}

        monkeypatch.setattr(Mixers, "functions", fewer)
        mixer_sizes(model.config, read_model_config(model.config), 1)

    with pytest.raises(UnsupportedMixerError, match="layer 0 computes its scan by itself"):
        learnt("torch_chunk_gated_delta_rule")
    with pytest.raises(UnsupportedMixerError, match="layer 0 computes its convolution by itself"):
        learnt("causal_conv1d_fn")
    learnt("mamba2_chunk_scan")
    assert module.causal_conv1d_fn.__qualname__ != "Mixers._convolve"


def test_mixers_of_other_sizes_or_kinds_are_refused() -> None:
    found = Mixers(LayerKinds(attention=(), mixers=(0, 1)))

    def convolve(layer: int, channels: int, **others: object) -> None:
        found.begin_convolution(layer)
        found.functions()["causal_conv1d_fn"](
            torch.zeros(1, channels, 2), torch.zeros(channels, 3), **others
        )

    found.begin()
    convolve(0, 8)
    with pytest.raises(UnsupportedMixerError, match="layer 1 keeps a state of another kind"):
        found.sizes()
    convolve(1, 9)
    with pytest.raises(UnsupportedMixerError, match="layer 1 keeps a state of other sizes"):
        found.sizes()
    with pytest.raises(UnsupportedMixerError, match="layer 1 keeps channels of two sizes"):
        convolve(1, 9)
    with pytest.raises(UnsupportedMixerError, match="layer 2 keeps a window, by its kind it has"):
        convolve(2, 8)
    found.begin()
    with pytest.raises(UnsupportedMixerError, match="layer 0 convolves behind gelu"):
        convolve(0, 8, activation="gelu")
    with pytest.raises(UnsupportedMixerError, match="layer 1 computes its scan by itself"):
        found.end_scan(1)
    with pytest.raises(UnsupportedMixerError, match="does not go through its cache"):
        found.begin()
        found.functions()["causal_conv1d_fn"](torch.zeros(1, 8, 2), torch.zeros(8, 3))


def test_a_bundle_says_what_its_mixers_keep(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    write_hybrid("qwen3_5_text", tmp_path / "target")
    stages: list[str] = []
    bundle = export_small(
        target=tmp_path / "target", progress=stages.append, max_gamma=3, max_tree_nodes=16
    )
    entry = bundle.manifest.target
    states = open_checkpoint(tmp_path / "target", max_context=None).slot_states(3)
    assert bundle.manifest.requires == (STATES,) and entry.states == states
    assert (entry.num_layers, entry.max_tree_nodes, entry.device_precision) == (1, 0, "")
    assert states is not None and states.slot_bytes == 4 * 2 * (1024 + 2 * (3 * 136 + 6 * 128))
    path = bundle.model_path(entry)
    assert not path.with_name(GROUPED_FILE).exists()
    for refused in (lambda: plan_parts(bundle, ()), lambda: plan_parts(bundle, ("target",))):
        with pytest.raises(BundleError, match="recurrent states, which were not measured on acc"):
            refused()
    assert any("1 layers with a cache, 2 with a recurrent state" in stage for stage in stages)
    assert certify_bundle(bundle, {"target": tmp_path / "target"})["target"]["rejections"]


def test_a_model_without_attention_is_served_with_drafts_as_without(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    for seed, name in enumerate(("target", "draft")):
        write_hybrid("mamba2", tmp_path / name, seed)
    bundle = export_small(target=tmp_path / "target", draft=tmp_path / "draft", max_gamma=3)
    entry = bundle.manifest.target
    assert (entry.num_layers, entry.num_kv_heads, entry.head_size) == (0, 0, 0)
    prompts = ["the quick brown", "def add", "a a a a a a"]
    asked = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with LLM(bundle.root, device="cpu", gamma=3, drafter="model") as llm:
        drafted = llm.generate(prompts, SamplingParams(**asked))
        plain = llm.generate(prompts, SamplingParams(**asked, speculation={"enabled": False}))
    for one, other in zip(drafted, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].speculation.drafted_by_position[2] > 0


def test_the_context_says_what_a_slot_takes_beside_keys_and_values() -> None:
    model_config = read_model_config(random_hybrid("lfm2").config)
    wide = replace(model_config, num_kv_heads=64, head_size=256)
    _, words = default_context({"target": wide}, slot_bytes=3 << 20)
    assert "a full slot takes 67 MiB" in words


@pytest.mark.parametrize("has_beta", [True, False])
def test_a_scan_in_pytorch_is_that_of_the_operator(has_beta: bool) -> None:
    """Both rules, with two heads of a state to one of the queries."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    class Scan(torch.nn.Module):
        training = False

        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            beta = given[5] if has_beta else None
            return mixers.linear_attention(*given[:5], beta, 2, 0.5)

    given = [rows(3, 7, 16), rows(3, 7, 16), rows(3, 7, 20), rows(3, 4, 8, 5), -rows(3, 7, 4).abs()]
    given += [rows(3, 7, 4).sigmoid()] if has_beta else []
    inputs = tuple(f"given.{index}" for index in range(len(given)))
    program = _trace(Scan(), Signature(tuple(given), None, inputs, ("answers", "after")))
    session = open_session(program.model_proto.SerializeToString())
    found = session.run(None, {name: one.numpy() for name, one in zip(inputs, given, strict=True)})
    for ours, theirs in zip(Scan()(*given), found, strict=True):
        assert np.abs(ours.numpy() - theirs).max() < 1e-5
