"""Choosing gamma against speculation off and every fixed gamma, on a clock that only engines move.

What steps cost is known exactly here, so that the shares lost to probes, to exploring and to learning
are seen without the noise of a machine; what choosing itself costs is measured elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.gamma.costs import CostTable, ModelCosts

from tests.runtime.gamma.test_controller import table
from tests.runtime.markov import Clock, Harness, counting_logits, limits

TOKENS = 48
GAMMAS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Prices:
    """What calls take, in plain steps of one row: per draft call, and per further row and token."""

    c: float
    v: float

    def target_s(self, rows: int, tokens: int) -> float:
        return 1.0 + self.v * (rows * max(tokens, 2) - 2)

    def draft_s(self, rows: int, tokens: int) -> float:
        return self.c * (1.0 + 0.1 * self.v * (rows * max(tokens, 2) - 2))


class PricedEngine(ScriptedEngine):
    """Every call takes its price on a clock."""

    num_calls = 0

    def __init__(self, logits, clock: Clock, price) -> None:
        super().__init__(logits, limits(10))
        self._clock, self._price = clock, price

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        self.num_calls += 1
        self._clock.now += self._price(len(spans), max(len(span.tokens) for span in spans))
        return super().extend(spans)


class Guesser:
    """A draft that is right for about this share of contexts."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, prefix: tuple[int, ...]) -> FloatArray:
        digest = hashlib.sha256(bytes(prefix)).digest()
        is_right = digest[0] < 256 * self.share
        return counting_logits(prefix if is_right else (prefix[-1] + 5,))


def known_costs(prices: Prices) -> CostTable:
    """The table that measuring these engines gives."""
    batches, tokens, draft_tokens = (1, 2, 4), (2, 3, 5, 9), (2, 5)

    def grid(price, widths: tuple[int, ...]) -> ModelCosts:
        seconds = tuple(tuple(price(rows, n) for n in widths) for rows in batches)
        return ModelCosts(
            batches=batches, tokens=widths, seconds=seconds, capacity=128, position_s=0.0
        )

    right = table()
    catch_up = ModelCosts(
        batches=(1,), tokens=(2, 16), capacity=128, position_s=0.0,
        seconds=((prices.draft_s(1, 2), prices.draft_s(1, 16)),),
    )  # fmt: skip
    return CostTable(
        target=grid(prices.target_s, tokens), draft=grid(prices.draft_s, draft_tokens),
        catch_up=catch_up, host=right.host, capacities=right.capacities,
    )  # fmt: skip


class Service:
    """One worker that serves the same prompts in every way."""

    def __init__(self, prices: Prices, costs: CostTable, share: float, batch: int) -> None:
        clock = Clock()
        self.clock = clock
        self.guesser = Guesser(share)
        self.harness = Harness(
            "F3",
            target=PricedEngine(counting_logits, clock, prices.target_s),
            draft=PricedEngine(self.guesser, clock, prices.draft_s),
            costs=costs,
            clock=clock,
            max_running=batch,
            queue_timeout_s=1e9,
        )
        self.count = 0

    @property
    def draft_calls(self) -> int:
        assert isinstance(self.harness.draft, PricedEngine)
        return self.harness.draft.num_calls

    def tokens_per_s(self, num_requests: int, **way: object) -> float:
        """Of requests that wait for one another's slots."""
        began = self.clock.now
        for number in range(num_requests):
            self.count += 1
            prompt = (1 + number % 5, 2 + number % 7, 3)
            self.harness.submit(str(self.count), prompt, max_tokens=TOKENS, **way)
        while self.harness.worker.run_step():
            pass
        return num_requests * TOKENS / (self.clock.now - began)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("prices", [Prices(0.05, 0.01), Prices(0.2, 0.1), Prices(0.4, 0.5)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_choosing_gamma_keeps_up_with_the_best_way(
    batch: int, prices: Prices, share: float
) -> None:
    service = Service(prices, known_costs(prices), share, batch)
    service.tokens_per_s(8 + 12 * batch)
    adaptive = service.tokens_per_s(100)
    off = service.tokens_per_s(16, is_enabled=False)
    fixed = {gamma: service.tokens_per_s(16, gamma=gamma) for gamma in GAMMAS}
    assert adaptive > 0.98 * off
    assert adaptive > 0.95 * max(fixed.values())


NOTICED_S = 2000.0
"""Plain steps of one row that are served at most until a change of the traffic is acted on."""


@pytest.mark.parametrize("batch", [1, 4])
def test_a_change_of_traffic_is_noticed_within_a_stated_time(batch: int) -> None:
    """Drafts were never right for a long time; then nearly all are, and no row is new to the server."""
    prices = Prices(0.2, 0.1)
    service = Service(prices, known_costs(prices), 0.02, batch)
    service.tokens_per_s(30 * batch)
    off = service.tokens_per_s(16, is_enabled=False)
    assert service.tokens_per_s(40) > 0.985 * off
    service.guesser.share = 0.95
    began = service.clock.now
    while service.tokens_per_s(batch) < 1.3 * off:
        assert service.clock.now - began < NOTICED_S


def test_where_nothing_pays_the_draft_model_is_left_alone_but_for_what_trying_costs() -> None:
    prices = Prices(0.4, 0.5)
    service = Service(prices, known_costs(prices), 0.1, 4)
    service.tokens_per_s(40)
    calls, seconds = service.draft_calls, service.clock.now
    service.tokens_per_s(80, is_enabled=False)
    assert service.draft_calls == calls
    plain_s = service.clock.now - seconds
    service.tokens_per_s(80)
    assert service.clock.now - seconds - plain_s < 1.01 * plain_s
    assert service.draft_calls - calls < 0.02 * 80 * TOKENS
