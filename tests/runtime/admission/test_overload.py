"""Two tenants on one server in virtual time: one asks for ten times its share, the other is to notice little of it.

A step takes a second and gives every row a token; a prompt is one token, so that a first token takes a step and the
wait for a slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from outrider.runtime.admission import order
from outrider.runtime.admission.quotas import Quotas
from outrider.runtime.core.errors import Overloaded, QuotaExceeded
from outrider.runtime.core.events import Event, Progressed
from outrider.runtime.core.tenant import NO_RULES, TenantRules

from tests.mutants import put_in
from tests.runtime.markov import Harness, spec

NUM_SLOTS = 8
NUM_OUTPUT = 16
"""On average; answers of all lengths around it, so that slots are given back one by one."""
SECONDS = 2000


@dataclass
class Simulation:
    """Arrivals of two tenants, as a handler would let them in.

    Attributes:
        waits_s: of the quiet tenant's requests, seconds to the first token.
        tokens: that each tenant was let have.
        refused: why, by how often.
    """

    rules: dict[str, TenantRules] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    max_queued: int = 10_000

    def run(self, rates: dict[str, float]) -> Simulation:
        """Have tenants ask so often per second, at random moments."""
        rng = np.random.default_rng(5)
        arrivals = sorted(
            (float(at_s), tenant)
            for tenant, rate in sorted(rates.items())
            for at_s in np.cumsum(rng.exponential(1.0 / rate, size=int(SECONDS * rate)))
        )
        harness = Harness(
            max_batch=NUM_SLOTS, has_draft=False, queue_timeout_s=1e9, max_queued=self.max_queued
        )
        self._harness, self._quotas = harness, Quotas()
        number = 0
        while arrivals and harness.clock.now < SECONDS:
            while arrivals and arrivals[0][0] <= harness.clock.now:
                number += 1
                self._ask(arrivals.pop(0)[1], str(number))
            harness.clock.now += 1.0
            harness.worker.run_step()
        return self

    def _ask(self, tenant: str, name: str) -> None:
        clock, rules = self._harness.clock, self.rules.get(tenant, NO_RULES)
        asked_s = clock.now

        def tell(event: Event) -> None:
            if isinstance(event, Progressed):
                if tenant == "quiet" and name not in seen:
                    self.waits_s.append(clock.now - asked_s)
                seen.add(name)
                self.tokens[tenant] += len(event.tokens)
                self._quotas.charge(tenant, rules, len(event.tokens), clock.now)

        seen: set[str] = set()
        wants = spec(
            name,
            (1,),
            max_tokens=8 + 5 * int(name) % 17,
            tenant=tenant,
            rules=rules,
            priority=self.priorities.get(tenant, 0),
        )
        try:
            self._quotas.begin(tenant, rules, clock.now)
            self._harness.worker.submit(wants, tell)
        except (QuotaExceeded, Overloaded) as error:
            self.refused[error.reason] += 1
            return
        self.tokens[tenant] += 1
        self._quotas.charge(tenant, rules, 1, clock.now)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.waits_s, 99))


QUIET = {"quiet": 0.05}
REQUESTS_PER_S = 0.25
TOKENS_PER_S = REQUESTS_PER_S * (NUM_OUTPUT + 1)


@pytest.mark.parametrize(
    "rules",
    [
        TenantRules(requests_per_s=REQUESTS_PER_S, burst_requests=4.0, max_slots=4),
        TenantRules(tokens_per_s=TOKENS_PER_S, burst_tokens=4.0 * 17, max_slots=4, max_queued=2),
    ],
    ids=["requests", "tokens"],
)
def test_ten_times_a_quota_takes_the_quota_and_slows_nobody(rules: TenantRules) -> None:
    alone = Simulation().run(QUIET)
    beside = Simulation({"loud": rules}).run({**QUIET, "loud": 10 * REQUESTS_PER_S})
    assert beside.tokens["loud"] <= 1.1 * TOKENS_PER_S * SECONDS
    assert beside.tokens["loud"] >= 0.8 * TOKENS_PER_S * SECONDS, "its share it gets"
    assert beside.refused["QUOTA_EXCEEDED"] > 1000
    assert beside.p99_s <= 1.3 * alone.p99_s
    assert min(len(beside.waits_s), len(alone.waits_s)) > 80


def check_that_a_flood_without_quotas_delays_others_by_a_slot() -> None:
    """Slots and queue are taken, and a slot is given back every other second: the other tenant waits for few."""
    beside = Simulation(max_queued=32).run({**QUIET, "loud": 2.0})
    assert beside.refused["QUEUE_FULL"] > 2000
    assert len(beside.waits_s) > 80
    assert np.mean(beside.waits_s) <= 2 * NUM_OUTPUT / NUM_SLOTS
    assert beside.p99_s <= 10.0
    assert beside.tokens["loud"] > 6 * SECONDS, "what others leave it may have"


def test_a_flood_without_quotas_delays_others_by_a_slot() -> None:
    check_that_a_flood_without_quotas_delays_others_by_a_slot()


def test_without_a_rule_between_tenants_the_flood_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in(monkeypatch, order, "one.num_held,\n                one.turn,", "0,")
    with pytest.raises(AssertionError):
        check_that_a_flood_without_quotas_delays_others_by_a_slot()


def test_a_better_priority_goes_first_and_the_rest_is_not_starved() -> None:
    rates = {**QUIET, "loud": 2.0}
    better = Simulation(priorities={"loud": 2}).run(rates)
    assert better.p99_s <= 10.0
    worse = Simulation(priorities={"quiet": 2}).run(rates)
    # Two levels of five seconds.
    assert np.mean(worse.waits_s) > 6.0 and worse.p99_s <= 10.0 + 10.0
    assert len(worse.waits_s) > 80
