"""Rotary variants answer as Transformers does on both sides of the original length, or end there and say so."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.checkpoint import open_checkpoint
from outrider.export.context import default_context
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from safetensors.numpy import save_file
from transformers import AutoConfig, PreTrainedModel

from scripts.check_parity import random_model
from tests.export.expert_models import random_experts
from tests.export.graph.untraced import UntracedSession, run_untraced

ORIGINAL, LONGEST = 32, 64
# Columns of a call behind the last token of a text: tables have positions for them too.
PADDING = 512
# Logits are up to 4; float32 is within 4e-6, angles of the other side of the original length are 1 away.
TOLERANCE = 2e-5
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
LENGTHS = {"rope_theta": 100.0, "original_max_position_embeddings": ORIGINAL}
YARN = LENGTHS | {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = LENGTHS | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LINEAR = PLAIN | {"rope_type": "linear", "factor": 4.0}
DYNAMIC = PLAIN | {"rope_type": "dynamic", "factor": 4.0}


def longrope(num_angles: int) -> dict[str, object]:
    """Factors of Phi-3's kind, the long ones far from the short ones."""
    short, long = ([first + 0.5 * i for i in range(num_angles)] for first in (1.0, 4.0))
    return LENGTHS | {"rope_type": "longrope", "short_factor": short, "long_factor": long}


# By name: family and fields of its configuration.
FIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn of latents": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "partial": ("gpt_neox", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "linear in some layers": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
    ),
}
PHI = {"sliding_window": None, "original_max_position_embeddings": ORIGINAL}
CHANGING: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "num_positions": ORIGINAL}),
    "longrope": ("phi3", PHI | {"rope_parameters": longrope(8)}),
    "longrope of some columns": (
        "phi3",
        PHI | {"partial_rotary_factor": 0.75, "rope_parameters": longrope(6)},
    ),
    "longrope in some layers": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": longrope(8), "sliding_attention": PLAIN}},
    ),
}


def model_of(family: str, fields: dict[str, Any]) -> PreTrainedModel:
    if family == "deepseek_v3":
        return random_experts(family, **fields)
    return random_model(family, **({"num_positions": LONGEST} | fields))


def text(num_tokens: int) -> IntArray:
    return np.random.default_rng(0).integers(0, 128, (1, num_tokens))


def by_transformers(variant: tuple[str, dict[str, Any]], num_tokens: int) -> FloatArray:
    """Logits of a model that has read nothing before: dynamic angles outlive a text."""
    with torch.no_grad():
        logits: FloatArray = model_of(*variant)(torch.tensor(text(num_tokens))).logits.numpy()
    return logits


def with_graphs_of(variants: Iterable[str], *few: str) -> list[Any]:
    """Each variant as what is traced, run by PyTorch, and as the graph: of few always."""
    names = list(variants)
    return [*((name, False) for name in names), *((name, True) for name in few)] + [
        pytest.param(name, True, marks=pytest.mark.long) for name in names if name not in few
    ]


@pytest.fixture
def answered(
    is_traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[PreTrainedModel, int], FloatArray]:
    """Returns logits of a text of so many tokens, by the graph of a model or what would be traced of it."""

    def answer(model: PreTrainedModel, num_tokens: int) -> FloatArray:
        if is_traced:
            export_model(model, tmp_path / "model.onnx", num_positions=num_tokens + PADDING)
        else:
            run_untraced(monkeypatch, UntracedSession(model, num_tokens + PADDING))
        return by_pieces(model, tmp_path / "model.onnx", num_tokens)

    return answer


def by_pieces(model: PreTrainedModel, path: Path, num_tokens: int) -> FloatArray:
    """Logits of the model's graph, by a prompt, a token and a span that ends at the last token."""
    runner = GraphRunner(
        path, read_model_config(model.config), batch=1, capacity=num_tokens + PADDING
    )
    cuts = [0, 20, 21, num_tokens]
    tokens = text(num_tokens)
    answers = [
        runner.extend(tokens[:, begin:end], np.array([begin]))
        for begin, end in itertools.pairwise(cuts)
    ]
    return np.concatenate(answers, axis=1)


@pytest.mark.parametrize(("name", "is_traced"), with_graphs_of(FIXED, "linear in some layers"))
def test_fixed_angles_are_right_on_both_sides_of_the_original_length(
    name: str, answered: Callable[[PreTrainedModel, int], FloatArray]
) -> None:
    variant = FIXED[name]
    found = answered(model_of(*variant), LONGEST)
    for length in (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, LONGEST):
        expected = by_transformers(variant, length)
        np.testing.assert_allclose(found[:, :length], expected, rtol=0, atol=TOLERANCE)
    plain = by_transformers((variant[0], variant[1] | {"rope_parameters": PLAIN}), LONGEST)
    assert np.abs(found - plain).max() > 100 * TOLERANCE


@pytest.mark.parametrize(("name", "is_traced"), with_graphs_of(CHANGING, "longrope in some layers"))
def test_changing_angles_are_right_up_to_the_original_length(
    name: str, answered: Callable[[PreTrainedModel, int], FloatArray]
) -> None:
    variant = CHANGING[name]
    model = model_of(*variant)
    with torch.no_grad():  # what it has read before does not matter
        model(torch.tensor(text(LONGEST)))
    found = answered(model, ORIGINAL)
    for length in (ORIGINAL - 1, ORIGINAL):
        expected = by_transformers(variant, length)
        np.testing.assert_allclose(found[:, :length], expected, rtol=0, atol=TOLERANCE)
    longer = by_transformers(variant, ORIGINAL + 1)[:, :ORIGINAL]
    assert np.abs(found - longer).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", CHANGING)
def test_a_longer_context_is_refused_before_a_weight_is_read(name: str, tmp_path: Path) -> None:
    family, fields = CHANGING[name]
    model_of(family, fields).config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    kind = name.split()[0]
    reason = f"above 32, where the angles of rope_type {kind} change .* --max-context 32$"
    with pytest.raises(BundleError, match=reason):
        open_checkpoint(tmp_path, max_context=ORIGINAL + 1)
    assert open_checkpoint(tmp_path, max_context=ORIGINAL).model_config.max_position == ORIGINAL
    model_config = open_checkpoint(tmp_path, max_context=None).model_config
    context, words = default_context({"target": model_config})
    assert context == ORIGINAL
    assert f"32, beyond which the angles of rope_type {kind} change" in words


def test_an_export_leaves_the_angles_of_a_model_as_they_were(tmp_path: Path) -> None:
    model = model_of(*CHANGING["longrope"])
    export_model(model, tmp_path / "model.onnx")
    with torch.no_grad():
        after = model(torch.tensor(text(LONGEST))).logits.numpy()
    np.testing.assert_array_equal(after, by_transformers(CHANGING["longrope"], LONGEST))


def test_an_alpha_fixes_the_angles_of_all_lengths() -> None:
    config = AutoConfig.for_model("hunyuan_v1_dense", rope_parameters=DYNAMIC | {"alpha": 1000.0})
    assert read_model_config(config).changing_rope == ""


def test_a_scale_chosen_by_the_longest_text_is_refused(tmp_path: Path) -> None:
    scales = {"short_mscale": 1.1, "long_mscale": 1.2}
    fields = PHI | {"head_dim": 16, "rope_parameters": longrope(8) | scales}
    config = AutoConfig.for_model("phimoe", hidden_size=64, num_attention_heads=4, **fields)
    config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(BundleError, match="phimoe: what the model computes depends on values"):
        open_checkpoint(tmp_path, max_context=ORIGINAL)
