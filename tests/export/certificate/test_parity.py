from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.manifest import MODEL_FILE
from outrider.export.certificate.parity import FLOAT32_TOLERANCE, check_parity, float32_tolerance
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import model_facts
from transformers import AutoModelForCausalLM


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


def test_tolerance_grows_with_the_greatest_logit(tiny_checkpoints: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[0]).eval()
    facts = model_facts(model.config)

    def tolerance() -> float:
        return float32_tolerance(Reference(model), facts, max_gamma=3)

    head = model.get_output_embeddings().weight.data
    first = tolerance()
    head *= 1e-3
    assert tolerance() == FLOAT32_TOLERANCE
    head *= 1e6
    large = tolerance()
    assert large > 100 * FLOAT32_TOLERANCE
    head *= 2
    assert tolerance() == pytest.approx(2 * large)
    assert FLOAT32_TOLERANCE <= first < 100 * FLOAT32_TOLERANCE
