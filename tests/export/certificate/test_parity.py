"""What float32 may differ by follows from the model's own rounding; what is beyond is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.names import MODEL_FILE
from outrider.export.certificate import reference as reference_module
from outrider.export.certificate.certify import certify, prepare
from outrider.export.certificate.doubles import Doubles
from outrider.export.certificate.parity import Bound, check_parity, float32_bound
from outrider.export.certificate.parity_cases import certified_prompts
from outrider.export.certificate.reference import Reference, reference_logits
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.trees import derive_tree_graphs
from outrider.export.model_config import read_model_config
from transformers import PreTrainedModel

from scripts.check_parity import random_model
from tests.export.certificate.bounds import within
from tests.export.certificate.mistakes import MISTAKES, planted
from tests.export.text2text_models import random_text2text

LIMITS = {"max_gamma": 3, "max_tree_nodes": 12}
# Logits of published models go beyond 30, and their embeddings are small, so that a norm's epsilon counts.
LOGITS = 40.0
FAMILIES = ("qwen2", "gemma3_text")
# Mistakes that a family has no place for; the other has.
LACKING = {"qwen2": ("window_off_by_one", "norm_without_one"), "gemma3_text": ("missing_bias",)}


def loud_model(family: str) -> PreTrainedModel:
    """A random model of few layers whose logits reach ``LOGITS``, with embeddings as small as published ones."""
    model = random_model(family, 200, tie_word_embeddings=False)
    model.get_input_embeddings().weight.data *= 0.1
    largest = np.abs(
        reference_logits(model, certified_prompts(read_model_config(model.config), 3))
    ).max()
    model.get_output_embeddings().weight.data *= LOGITS / largest
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = loud_model(request.param)
    path = tmp_path_factory.mktemp(request.param) / "target" / MODEL_FILE
    export_model(model, path)
    derive_grouped_graph(path)
    derive_tree_graphs(path)
    return model, path


def test_a_right_graph_passes_with_room(exported: tuple[PreTrainedModel, Path]) -> None:
    model, path = exported
    model_config = read_model_config(model.config)
    reference = prepare(model, model_config, **LIMITS)
    bound = float32_bound(reference, model_config, max_gamma=3)
    certify(
        reference,
        path,
        model_config,
        **LIMITS,
        bound=dataclasses.replace(bound, value=bound.value / 2),
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_five_times_too_far(
    exported: tuple[PreTrainedModel, Path], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = exported
    model_config, bound = read_model_config(model.config), bound_of(model)
    # What a wrong model rounds away is its own.
    monkeypatch.setattr(reference_module, "_most_apart", lambda *_: 0.0)
    with planted(model, mistake) as is_planted:
        if not is_planted:
            assert mistake in LACKING[model.config.model_type]
            return
        with pytest.raises(BundleError, match="parity case"):
            check_parity(model, path, model_config, max_gamma=3, bound=within(5 * bound.value))
    check_parity(model, path, model_config, max_gamma=3, bound=bound)


def bound_of(model: PreTrainedModel, accepted: float | None = None) -> Bound:
    return float32_bound(
        Reference(model), read_model_config(model.config), max_gamma=3, accepted=accepted
    )


@pytest.mark.parametrize("family", ["llama", "t5_v1_1"])
def test_the_bound_grows_with_the_logits(family: str) -> None:
    model = random_model(family, 64) if family == "llama" else random_text2text(family)
    head = model.get_output_embeddings().weight.data
    head /= 64
    small = bound_of(model).value
    assert 0 < small < 1e-4
    head *= 8
    assert bound_of(model).value == pytest.approx(8 * small, rel=0.3)


@pytest.mark.parametrize("bias", [-1e9, -float("inf")])
def test_the_bias_of_a_token_that_is_never_drawn_says_nothing_of_rounding(bias: float) -> None:
    model = random_text2text("marian")
    expected = bound_of(model)
    model.final_logits_bias[0, 0] = bias
    assert bound_of(model) == expected


def test_doubles_compute_all_of_a_model_in_float64() -> None:
    model = random_model("gpt2", 64)
    tokens = certified_prompts(read_model_config(model.config), 3)
    with Doubles():
        found = reference_logits(model, tokens)
    assert found.dtype == np.float64
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_what_casts_to_float32_by_itself_is_float64_inside_of_doubles() -> None:
    """Norms and angles do: their own rounding is part of what is measured."""
    model = random_model("llama", 64)
    tokens = certified_prompts(read_model_config(model.config), 3)
    model.model.norm.register_forward_hook(lambda _, __, found: seen.append(found.dtype))
    seen: list[torch.dtype] = []
    with Doubles():
        exact = reference_logits(model, tokens)
        assert (
            torch.ones(2).to(torch.float32).softmax(0, dtype=torch.float32).dtype == torch.float64
        )
    assert seen == [torch.float64]
    with torch.no_grad():
        rounded = model.double()(torch.from_numpy(tokens)).logits.numpy()
    assert 1e-9 < np.abs(exact - rounded).max() < 1e-4


def test_logits_that_are_not_numbers_are_refused_before_a_graph_is_written() -> None:
    model = random_model("llama", 64)
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(
        BundleError, match="PyTorch's own logits of this checkpoint are not numbers"
    ):
        prepare(model, read_model_config(model.config), **LIMITS)


def test_a_text_that_rounds_more_is_allowed_more_and_no_other() -> None:
    bound = Bound(value=0.006, why="six times", rounding=0.001)
    assert bound.of(0.0) == bound.of(0.001) == 0.006
    assert bound.of(0.01) == pytest.approx(0.06)


def test_a_wider_bound_is_accepted_and_says_what_it_would_have_been() -> None:
    model = random_model("llama", 64)
    own = bound_of(model)
    assert bound_of(model, own.value / 2) == own
    wide = bound_of(model, 1.0)
    assert wide.of(0.0) == wide.of(own.rounding) == 1.0
    # Where PyTorch rounds more, no more than either allows: what is accepted is not multiplied.
    assert wide.of(10 * own.rounding) == 1.0
    assert wide.of(2 * own.rounding / own.value) == own.of(2 * own.rounding / own.value) > 1.0
    assert wide.why == f"accepted; without --accept-parity {own.value:.3g}, {own.why}"
