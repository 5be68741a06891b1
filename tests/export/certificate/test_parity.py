from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.names import MODEL_FILE
from outrider.export.certificate.parity import FLOAT32_TOLERANCE, check_parity, float32_tolerance
from outrider.export.certificate.reference import Reference
from outrider.export.facts import model_facts
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.export.text2text_models import random_text2text


def test_certificate_fails_when_one_weight_differs(
    tiny_checkpoints: tuple[Path, Path], tiny_bundle: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).eval()
    path = tiny_bundle / "target" / MODEL_FILE
    facts = model_facts(model.config)
    certificate = check_parity(model, path, facts, max_gamma=3)
    assert certificate["verify"]["num_greedy_equal"] == certificate["verify"]["num_compared"]
    model.model.layers[1].self_attn.k_proj.weight.data[3] += 0.5
    with pytest.raises(BundleError, match="parity case"):
        check_parity(model, path, facts, max_gamma=3)


def tolerance_of(model: PreTrainedModel) -> float:
    return float32_tolerance(Reference(model), model_facts(model.config), max_gamma=3)


def test_tolerance_grows_with_the_greatest_logit_of_a_model_with_an_encoder() -> None:
    model = random_text2text("t5_v1_1")
    head = model.get_output_embeddings().weight.data
    head *= 1e-3
    assert tolerance_of(model) == FLOAT32_TOLERANCE
    head *= 1e6
    large = tolerance_of(model)
    assert large > 100 * FLOAT32_TOLERANCE
    head *= 2
    assert tolerance_of(model) == pytest.approx(2 * large, rel=1e-4)


@pytest.mark.parametrize("bias", [-1e9, -float("inf")])
def test_tolerance_does_not_grow_with_the_bias_of_a_token_that_is_never_drawn(bias: float) -> None:
    model = random_text2text("marian")
    expected = tolerance_of(model)
    model.final_logits_bias[0, 0] = bias
    assert tolerance_of(model) == expected


def test_tolerance_of_a_decoder_alone_is_plain(tiny_checkpoints: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).eval()
    model.get_output_embeddings().weight.data *= 1e3
    assert tolerance_of(model) == FLOAT32_TOLERANCE
