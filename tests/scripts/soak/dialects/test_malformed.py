"""Malformed requests of KServe's and vLLM's dialect end in a refusal, or could be answered."""

import pytest

from scripts.soak.dialects import malformed

NUM_MESSAGES = 6_000


def test_nothing_but_refusals_and_requests_comes_of_them():
    reasons, problems = malformed.in_process(NUM_MESSAGES, seed=3)
    assert problems == []
    assert reasons.total() == 2 * NUM_MESSAGES
    for dialect in ("kserve", "vllm"):
        # Parser and checks both have their share.
        assert reasons[f"{dialect}: MALFORMED_REQUEST"] > NUM_MESSAGES / 20
        assert reasons[f"{dialect}: INVALID_PARAMETER"] > NUM_MESSAGES / 20
        assert reasons[f"{dialect}: UNSUPPORTED_OPTION"] > NUM_MESSAGES / 100
        assert reasons[f"{dialect}: OK"] > NUM_MESSAGES / 200


def test_what_is_raised_beside_refusals_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(malformed, "check_request", lambda *_: 1 // 0)
    _, problems = malformed.in_process(200, seed=3)
    assert problems
    assert all("ZeroDivisionError" in problem for problem in problems)
