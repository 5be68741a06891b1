"""What the server answers, and what people see of it, is as it was recorded (``python -m tests.judges.record``)."""

from __future__ import annotations

import json

import pytest
from outrider.engines.devices import integer_sums_overflow

from tests.judges.bundles import VARIANTS, bundle
from tests.judges.outcomes import Outcome
from tests.judges.record import BUNDLES, OUTCOMES, SURFACE, kept_requests, outcomes, read_lines
from tests.judges.surface import ROOT, surface


def differing(found: list[Outcome], recorded: list[Outcome]) -> list[str]:
    """Return which requests had another outcome, the first ones in words."""
    requests = kept_requests()
    return [
        f"{request.method} {request.body!r}: {new}, recorded {old}"
        for request, new, old in zip(requests, found, recorded, strict=True)
        if new != old
    ]


@pytest.fixture(scope="module")
def recorded() -> list[Outcome]:
    return read_lines(OUTCOMES)


async def test_requests_of_all_protocols_have_the_outcomes_that_were_recorded(
    recorded: list[Outcome],
) -> None:
    found = await outcomes(kept_requests())
    changed = differing(found, recorded)
    assert not changed, "\n".join([f"{len(changed)} differ", *changed[:5]])


def test_what_is_recorded_has_answers_and_refusals_of_every_protocol(
    recorded: list[Outcome],
) -> None:
    requests = kept_requests()
    assert len(requests) >= 2000
    for name in ("/outrider.v1", "/vllm.grpc", "/inference", "/v1/completions", "/v1/chat"):
        codes = [
            str(one["code"])
            for asked, one in zip(requests, recorded, strict=True)
            if asked.method.startswith(name)
        ]
        assert sum(code in ("OK", "200") for code in codes) > 85
        assert sum(code in ("INVALID_ARGUMENT", "400") for code in codes) > 90
    assert not any(one["code"] in ("INTERNAL", "UNKNOWN", 500) for one in recorded)


@pytest.mark.parametrize("part", ["code", "fields", "reason", "answer"])
def test_a_changed_outcome_is_seen(part: str, recorded: list[Outcome]) -> None:
    number = next(i for i, one in enumerate(recorded) if one.get(part))
    changed = [dict(one) for one in recorded]
    changed[number][part] = "another"
    assert len(differing(changed, recorded)) == 1


def test_metrics_options_settings_and_mutants_are_those_that_were_recorded() -> None:
    kept = json.loads(SURFACE.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(surface()))
    for name, values in kept.items():
        assert len(values) > 40 and found[name] == values, name
    assert found.keys() == kept.keys()


RECORDED_BUNDLES = json.loads(BUNDLES.read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_a_bundle_has_the_graphs_that_were_recorded(name: str) -> None:
    found = bundle(name)
    for part, values in RECORDED_BUNDLES[name].items():
        # Where the library's integer sums overflow, answers are others: a start warns of it.
        if (name, part) != ("w8a8", "greedy") or not integer_sums_overflow():
            assert found[part] == values, part


PROMISES: dict[str, list[str]] = json.loads((ROOT / "tests/judges/promises.json").read_text())


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_of_the_readme_has_its_tests(promise: str) -> None:
    """Whoever changes the words looks at the tests, and the other way round."""
    assert promise in (ROOT / "README.md").read_text(encoding="utf-8")
    for test in PROMISES[promise]:
        file, _, name = test.partition("::")
        wanted = f"def {name}(" if name else "def test_"
        assert wanted in (ROOT / file).read_text(encoding="utf-8"), test
