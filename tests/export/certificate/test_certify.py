"""Verdicts on certificates, with nothing computed."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.certificate.certify import _refuse_farther, certify_bundle, verdict
from outrider.export.certificate.parity import Bound, CaseResult, compare_logits, judged
from outrider.export.certificate.reference import Logits

from tests.addons import needs_accelerators

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
        _refuse_farther("target", {"prefill": FOUND}, recorded, "int8", BOUND)


@pytest.mark.parametrize("recorded", [{"prefill": FOUND}, {"int8": {"prefill": FOUND}}])
def test_a_case_may_be_as_far_as_it_was(recorded: object) -> None:
    _refuse_farther("target", {"prefill": FOUND}, recorded, "int8", BOUND)
    with pytest.raises(BundleError, match=r"case prefill differs by 0\.401 .* by 0\.2 "):
        _refuse_farther(
            "target", {"prefill": FOUND | {"max_difference": 0.401}}, recorded, "int8", BOUND
        )
    at_most = {"prefill": FOUND | {"max_difference": 0.399}}
    _refuse_farther("target", at_most, recorded, "int8", BOUND)


BOUND = Bound(value=0.1, why="six times 0.02", rounding=0.02)
ALLOWED = "allowed 0.1: six times 0.02; a graph as far computes something else: try another release of Transformers, "


@pytest.mark.parametrize(
    ("difference", "lost_lead", "bound", "said"),
    [
        (math.inf, 0.0, None, "is not a number"),
        (math.inf, 0.0, BOUND, "is not a number"),
        (0.2, 0.0, BOUND, f"differs by 0.2, {ALLOWED}"),
        (0.1, 0.11, BOUND, f"takes a token 0.11 below the likeliest, {ALLOWED}"),
    ],
)
def test_a_case_that_strays_says_how(
    difference: float, lost_lead: float, bound: Bound | None, said: str
) -> None:
    result = CaseResult(
        max_difference=difference, num_greedy_equal=0, num_compared=1, lost_lead=lost_lead
    )
    where = "target/model.onnx: parity case prefill"
    with pytest.raises(BundleError, match=f"^{re.escape(f'{where} {said}')}"):
        judged("prefill", [result], Path("bundle/target/model.onnx"), bound)


def test_a_choice_that_trails_by_no_more_than_the_bound_is_a_tie() -> None:
    expected = Logits(
        values=np.array([[[1.0, 1.05, 0.0]]], np.float32), measure_rounding=lambda: 0.02
    )
    found = compare_logits(np.array([[[1.06, 1.0, 0.0]]], np.float32), expected)
    assert (found.num_greedy_equal, found.references[0].rounding) == (0, 0.02)
    assert found.lost_lead == pytest.approx(0.05)
    judged("prefill", [found], Path("bundle/target/model.onnx"), BOUND)


@needs_accelerators
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
