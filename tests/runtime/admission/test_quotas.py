"""Buckets of requests and tokens: what is used over a long time, and when a refused caller may come back."""

from __future__ import annotations

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from outrider.runtime.admission import quotas
from outrider.runtime.admission.quotas import MANY_METERS, MOST_RETRY_S, Quotas
from outrider.runtime.core.errors import QuotaExceeded
from outrider.runtime.core.tenant import NO_RULES, TenantRules

from tests.mutants import assert_caught


def test_without_rules_nothing_is_counted() -> None:
    used = Quotas()
    for _ in range(1000):
        used.begin("a", NO_RULES, 0.0)
        used.charge("a", NO_RULES, 10**9, 0.0)
    assert not used._meters


def test_a_burst_begins_at_once_and_then_the_rate_counts() -> None:
    used, rules = Quotas(), TenantRules(requests_per_s=2.0, burst_requests=3.0)
    for _ in range(3):
        used.begin("a", rules, 10.0)
    with pytest.raises(QuotaExceeded) as refusal:
        used.begin("a", rules, 10.0)
    assert (refusal.value.quota, refusal.value.retry_after_s) == ("requests_per_s", 0.5)
    used.begin("b", rules, 10.0)
    used.begin("a", rules, 10.5)
    with pytest.raises(QuotaExceeded):
        used.begin("a", rules, 10.9)


def test_an_answer_may_use_more_than_is_left_and_is_paid_off_before_the_next_request() -> None:
    used, rules = Quotas(), TenantRules(tokens_per_s=100.0, burst_tokens=50.0)
    used.begin("a", rules, 0.0)
    used.charge("a", rules, 40, 0.0)
    used.begin("a", rules, 0.0)
    used.charge("a", rules, 1000, 0.0)
    with pytest.raises(QuotaExceeded) as refusal:
        used.begin("a", rules, 0.0)
    assert (refusal.value.quota, refusal.value.retry_after_s) == ("tokens_per_s", 9.91)
    with pytest.raises(QuotaExceeded):
        used.begin("a", rules, 9.9)
    used.begin("a", rules, refusal.value.retry_after_s)


def test_a_refusal_counts_no_request() -> None:
    rules = TenantRules(requests_per_s=1.0, tokens_per_s=1.0)
    used = Quotas()
    used.charge("a", rules, 5, 0.0)
    for _ in range(10):
        with pytest.raises(QuotaExceeded):
            used.begin("a", rules, 0.0)
    used.begin("a", rules, 5.0)


def test_a_tenant_without_a_rate_comes_back_in_an_hour() -> None:
    used, rules = Quotas(), TenantRules(requests_per_s=0.0)
    used.begin("a", rules, 0.0)
    with pytest.raises(QuotaExceeded) as refusal:
        used.begin("a", rules, 0.0)
    assert refusal.value.retry_after_s == MOST_RETRY_S


def test_rules_that_change_count_from_then_on() -> None:
    used = Quotas()
    used.charge("a", TenantRules(tokens_per_s=1.0), 11, 0.0)
    used.begin("a", TenantRules(tokens_per_s=10.0, burst_tokens=11.0), 1.0)
    with pytest.raises(QuotaExceeded):
        used.begin("a", TenantRules(tokens_per_s=1.0), 1.5)


def test_names_that_come_and_go_need_no_memory() -> None:
    used, rules = Quotas(), TenantRules(requests_per_s=10.0)
    for number in range(4 * MANY_METERS):
        used.begin(str(number), rules, number / 100.0)
    assert len(used._meters) <= MANY_METERS


# Without shrinking: the mutants below fail on purpose.
@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 40)), min_size=1, max_size=80),
    st.floats(0.1, 50.0),
    st.floats(1.0, 20.0),
)
def check_no_window_takes_more_than_its_share(
    calls: list[tuple[float, int]], rate: float, burst: float
) -> None:
    """Requests: burst + rate * seconds, in every window. Tokens: one answer more. A refused one may come when told."""
    rules = TenantRules(
        requests_per_s=rate, burst_requests=burst, tokens_per_s=10 * rate, burst_tokens=10 * burst
    )
    used, now = Quotas(), 0.0
    begun: list[tuple[float, int]] = []
    for pause_s, num_tokens in calls:
        now += pause_s
        try:
            used.begin("a", rules, now)
        except QuotaExceeded as refusal:
            now += refusal.retry_after_s
            try:
                used.begin("a", rules, now)
            except QuotaExceeded as second:
                assert second.quota != refusal.quota
                continue
        used.charge("a", rules, num_tokens, now)
        begun.append((now, num_tokens))
    for first, (start, _) in enumerate(begun):
        for last in range(first, len(begun)):
            window_s = begun[last][0] - start
            assert last - first + 1 <= burst + rate * window_s + 1e-3
            num_before = sum(tokens for _, tokens in begun[first:last])
            assert num_before <= 10 * (burst + rate * window_s) + 1e-3


def test_no_window_takes_more_than_its_share() -> None:
    check_no_window_takes_more_than_its_share()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".used += 1.0", ".used += 0.0"),
        (".used += num_tokens", ".used += 0"),
        ("- self.rate * max", "- 1.2 * self.rate * max"),
        ("excess / rate)", "excess / rate / 2)"),
        ("max(0.0, self.used", "max(-50.0, self.used"),
    ],
)
def test_mutants_give_more_away(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert_caught(
        monkeypatch,
        quotas,
        old,
        new,
        check_no_window_takes_more_than_its_share,
        (AssertionError, ExceptionGroup),
    )


def test_hints_are_whole_milliseconds_and_never_too_early() -> None:
    used, rules = Quotas(), TenantRules(requests_per_s=3.0)
    for _ in range(3):
        used.begin("a", rules, 0.0)
    with pytest.raises(QuotaExceeded) as refusal:
        used.begin("a", rules, 0.0)
    hint_ms = refusal.value.retry_after_s * 1000
    assert math.isclose(hint_ms, 334.0)
    used.begin("a", rules, refusal.value.retry_after_s)
