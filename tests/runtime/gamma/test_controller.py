"""Gammas follow costs and acceptance, and what drafts may lose is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from outrider.engines.base import FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.gamma import guard
from outrider.runtime.gamma.acceptance import CALLED, PROPOSED
from outrider.runtime.gamma.costs import CostTable, HostCosts, ModelCosts, RowCosts, RowKind

from tests.runtime.drafters.model.test_parallel import Parallel
from tests.runtime.markov import Clock, Harness, counting_logits, limits

MAX_GAMMA = 8
LENGTH = 60


def table(
    *, c: float = 0.05, slope: float = 0.0, token_s: float = 0.0, catch_up_s: float = 0.01
) -> CostTable:
    """Target: 1 s for up to two tokens, ``slope`` more for each further one. Draft: c per call."""
    tokens = (2, 3, 9)
    verify = tuple(1.0 + slope * (n - 1) for n in tokens)
    catch_up = ModelCosts(
        batches=(1,),
        tokens=(1, 100),
        seconds=((catch_up_s, 100 * catch_up_s),),
        capacity=128,
        position_s=0.0,
    )
    return CostTable(
        target=ModelCosts(
            batches=(1, 8),
            tokens=(1, *tokens),
            seconds=((1.0, *verify),) * 2,
            capacity=128,
            position_s=0.0,
        ),
        draft=ModelCosts(
            batches=(1,), tokens=(1,), seconds=((max(c, 1e-12),),), capacity=128, position_s=0.0
        ),
        catch_up=catch_up,
        host=HostCosts(
            step_s=0.0,
            call_s=0.0,
            rows={kind: RowCosts(row_s=0.0, token_s=token_s) for kind in RowKind},
        ),
        capacities=(128, 256),
    )


class PricedEngine(ScriptedEngine):
    """Every call takes ``call_s`` on a clock, and ``token_s`` more per further token of its widest row."""

    def __init__(
        self, logits, clock: Clock, call_s: float, token_s: float = 0.0, max_source: int = 0
    ) -> None:
        super().__init__(logits, replace(limits(10), max_source=max_source))
        self._clock, self._call_s, self._token_s = clock, call_s, token_s

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        widest = max(len(span.tokens) for span in spans)
        self._clock.now += self._call_s + self._token_s * max(0, widest - 2)
        return super().extend(spans)


def wrong_logits(prefix: tuple[int, ...]) -> FloatArray:
    return counting_logits((prefix[-1] + 5,))


def served(
    c: float, *, draft=counting_logits, costs: CostTable | None = None, **options: object
) -> Harness:
    """A worker whose target takes 1 s a step, and whose draft c s a call."""
    clock = Clock()
    return Harness(
        "F3",
        target=PricedEngine(counting_logits, clock, 1.0),
        draft=PricedEngine(draft, clock, c),
        costs=costs or table(c=c),
        clock=clock,
        queue_timeout_s=1e9,
        **options,
    )


def serve(one: Harness, names: Sequence[str], **options: object) -> float:
    """Seconds of requests one after another."""
    began = one.clock.now
    for name in names:
        one.submit(name, max_tokens=LENGTH, **options)
        one.run()
    return one.clock.now - began


def gammas_of(one: Harness, name: str) -> list[int]:
    return [
        len(event.trace.draft_tokens)
        for event in one.events[name]
        if isinstance(event, Progressed) and not event.trace.is_prompt
    ]


def test_probes_are_few_and_the_speed_up_is_measured() -> None:
    one = served(0.1)
    serve(one, [str(n) for n in range(80)])
    report = one.worker.snapshot().control
    num_steps = report.num_steps_on + report.num_steps_off
    assert 0 < report.num_probes < 0.03 * num_steps + guard.PROBE_STEPS
    # Nine tokens for a step and eight calls.
    assert report.speed_up == pytest.approx(9 / 1.8, rel=0.1)
    assert report.regret < 0.1
    assert report.best_fixed_gamma == MAX_GAMMA
    assert report.num_steps_on > 0
    assert one.worker.default_speculation.is_adaptive


@pytest.mark.parametrize(("read_s", "drafts"), [(1e-3, True), (1e6, False)])
def test_a_source_that_the_draft_model_has_not_read_has_its_price(
    read_s: float, drafts: bool
) -> None:
    """A row that decodes misses it and three tokens, of which one is fed along: no third one is to be paid for."""
    clock = Clock()
    draft_read = ModelCosts(
        batches=(1,), tokens=(1, 8), seconds=((read_s, read_s),), capacity=8, position_s=0.0
    )

    catch_up = replace(draft_read, tokens=(2, 3), seconds=((1e-3, 1e6),))

    def logits(source: tuple[int, ...], text: tuple[int, ...]) -> FloatArray:
        return counting_logits(text)

    one = Harness(
        target=PricedEngine(logits, clock, 1.0, max_source=8),
        draft=PricedEngine(logits, clock, 0.05, max_source=8),
        costs=replace(table(), draft_read=draft_read, catch_up=catch_up),
        clock=clock,
        queue_timeout_s=1e9,
    )
    one.submit("a", (0, 1), source_tokens=(1, 2, 3), max_tokens=LENGTH)
    one.run()
    assert (one.finished("a").report.num_drafted > 0) is drafts


def test_what_drafts_lose_is_bounded_though_the_table_promises_a_gain() -> None:
    """The table says that drafts cost nothing; they take three steps each, and are never right."""
    one = served(3.0, draft=wrong_logits, costs=table(c=0.01, catch_up_s=1e-6))
    names = [str(n) for n in range(60)]
    took_s = serve(one, names)
    plain_s = serve(one, [f"off{n}" for n in names], is_enabled=False)
    # The first budget, what one step overdraws, and a share of the time; not half of it.
    assert took_s - plain_s < guard.FIRST_STEPS + 30.0 + 0.02 * plain_s
    assert sum(map(sum, (gammas_of(one, name) for name in names[-20:]))) <= 20


def test_a_table_that_is_wrong_is_corrected_by_the_steps_that_are_served() -> None:
    """The table says that a draft call takes as long as a step; it takes a hundredth."""
    one = served(0.01, costs=table(c=0.4))
    serve(one, [str(n) for n in range(30)])
    assert max(gammas_of(one, "29")) == MAX_GAMMA


def test_two_equal_choices_never_alternate() -> None:
    """From the second request on, one length is kept but for probes and ends."""
    one = served(
        0.2, draft=lambda prefix: (counting_logits if len(prefix) % 5 else wrong_logits)(prefix)
    )
    serve(one, [str(n) for n in range(20)])
    lengths = [g for n in range(10, 20) for g in gammas_of(one, str(n))[:-4]]
    changes = sum(a != b for a, b in pairwise(lengths))
    assert changes < 0.35 * len(lengths)


def test_a_deadline_forbids_steps_that_would_miss_it() -> None:
    one = served(0.3)
    serve(one, ["warm", "up"])
    assert max(gammas_of(one, "up")) >= 4
    one.submit("late", max_tokens=LENGTH, deadline_s=one.clock.now + 4.0)
    while one.worker.run_step():
        pass
    # Four plain steps fit, one of eight drafts does not once a second has gone.
    assert sum(gammas_of(one, "late")) <= 8


def test_deciding_is_paid_from_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that takes a tenth of a step is taken every twentieth step, not every second one."""
    one = served(0.1)
    gamma_controller = one.worker._parts.gamma_controller
    decide, num_decisions = gamma_controller._decide, 0

    def dear(caps: object) -> None:
        nonlocal num_decisions
        num_decisions += 1
        one.clock.now += 0.1
        decide(caps)

    monkeypatch.setattr(gamma_controller, "_decide", dear)
    names = [str(n) for n in range(40)]
    serve(one, names)
    assert num_decisions > 40
    num_decisions, gamma_controller._decision.owed_s = 0, 1e9
    serve(one, [f"b{name}" for name in names])
    assert num_decisions == 0


def test_nothing_is_claimed_before_the_first_step() -> None:
    report = served(0.1).worker.snapshot().control
    assert report.speed_up is None
    assert report.regret is None


def test_a_row_that_is_drafted_nothing_for_keeps_no_other_from_being_tried() -> None:
    """Its try ends, and the draft model of the other row, which the table calls too dear, is found to pay."""
    never = DraftingConfig(lookup_min_ngram=90, lookup_max_ngram=90, datastore_max_match=90)
    one = served(0.01, costs=table(c=1.5), drafting=never)
    one.submit("lookup", max_tokens=90, drafter="lookup")
    one.submit("model", max_tokens=90, drafter="model")
    one.run()
    assert one.finished("lookup").report.num_drafted == 0
    assert one.finished("model").report.num_accepted > 10


def test_what_was_drafted_in_one_call_counts_as_one() -> None:
    one = Harness("F3", draft=Parallel(), costs=table(c=0.1), clock=(clock := Clock()))
    one.target = one.worker._parts.target
    one.submit("a", max_tokens=60, drafter="model")
    while one.worker.run_step():
        clock.now += 1.0
    (evidence,) = one.worker._parts.gamma_controller._acceptance._groups.values()
    assert evidence[CALLED, 0] > 3.0
    assert not evidence[CALLED, 1:].any()
    assert evidence[PROPOSED, 1] > 3.0
