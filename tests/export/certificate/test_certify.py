"""Verdicts on certificates, with nothing computed."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.certificate.certify import _refuse_farther, certify_bundle, verdict
from outrider.export.certificate.parity import CaseResult, judged

FOUND = {"max_difference": 0.2, "num_greedy_equal": 3, "num_compared": 4}


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        {},
        [],
        {"int8": None},
        {"int8": {"verify": FOUND}},
        {"prefill": {"max_difference": []}},
    ],
)
def test_cases_of_which_the_manifest_has_none_do_not_pass(recorded: object) -> None:
    with pytest.raises(BundleError, match="target: the manifest's certificate has no cases to"):
        _refuse_farther("target", {"prefill": FOUND}, recorded, "int8")


@pytest.mark.parametrize("recorded", [{"prefill": FOUND}, {"int8": {"prefill": FOUND}}])
def test_a_case_may_be_as_far_as_it_was(recorded: object) -> None:
    _refuse_farther("target", {"prefill": FOUND}, recorded, "int8")
    with pytest.raises(BundleError, match=r"case prefill differs by 0\.4 .* by 0\.2 "):
        _refuse_farther("target", {"prefill": FOUND | {"max_difference": 0.4}}, recorded, "int8")


@pytest.mark.parametrize(
    ("difference", "tolerance", "said"),
    [
        (math.inf, None, "target/model.onnx: parity case prefill is not a number"),
        (math.inf, 0.1, "target/model.onnx: parity case prefill is not a number"),
        (0.2, 0.1, "target/model.onnx: parity case prefill differs by 0.2, allowed 0.1"),
    ],
)
def test_a_case_that_strays_says_how(difference: float, tolerance: float | None, said: str) -> None:
    result = CaseResult(max_difference=difference, num_greedy_equal=0, num_compared=1)
    with pytest.raises(BundleError, match=f"^{re.escape(said)}$"):
        judged("prefill", [result], Path("bundle/target/model.onnx"), tolerance)


def test_a_bundle_with_encoders_is_held_against_its_own_checkpoints_alone(
    tiny_text2text_bundle: Path, tiny_text2text_checkpoints: tuple[Path, Path]
) -> None:
    bundle = load_bundle(tiny_text2text_bundle)
    target, draft = tiny_text2text_checkpoints
    found = certify_bundle(bundle, {"draft": draft})
    assert found["draft"] == bundle.manifest.certificate["draft"]
    assert "parity holds; draft: logits within" in verdict(found)
    sourceless = replace(bundle.manifest.draft, source=None)
    other = replace(bundle, manifest=replace(bundle.manifest, draft=sourceless))
    with pytest.raises(BundleError, match=r"source\.num_heads of this checkpoint is 4, .* None"):
        certify_bundle(other, {"draft": draft})
    with pytest.raises(BundleError, match="num_layers of this checkpoint is 2, of the bundle's 1"):
        certify_bundle(bundle, {"draft": target})
