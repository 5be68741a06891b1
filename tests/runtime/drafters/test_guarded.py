"""Drafters of others that say what is not so of the draft model's cache lose speed, and nobody else anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import EngineError, Source
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.drafters.base import Draft, DraftRow
from outrider.runtime.drafters.model.model import ModelDrafter
from outrider.runtime.drafters.registry import CountingEngine, GuardedDrafter, held_to

from tests.runtime.drafters.rows import row
from tests.runtime.drafters.test_registry import documented_example, install
from tests.runtime.markov import Harness, counting_logits, limits
from tests.runtime.sourced import PAIRS, bounds_of

NAME = "acme_claims"

CLAIMS = """

from dataclasses import replace


class Claiming(SuccessorDrafter):
    def propose(self, live, chosen):
        return [replace(one, num_computed=CLAIM) for one in super().propose(live, chosen)]
"""

USES_MODEL = """
from dataclasses import replace

from outrider.engines.base import Span
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.model.model import ModelDrafter


class Claiming(ModelDrafter):
    def propose(self, live, chosen):
        drafts = super().propose(live, chosen)
        return [replace(one, num_computed=CLAIM) for one in drafts]


class Idle(ModelDrafter):
    def propose(self, live, chosen):
        lengths = [len(live[slot].sampling.history) for slot in chosen]
        return [Draft(tokens=(3,), num_computed=length - 1) for length in lengths]


class Intruding(ModelDrafter):
    def propose(self, live, chosen):
        for slot in range(len(live)):
            if slot not in chosen:
                self._engine.extend([Span(slot=slot, start=0, tokens=(1,), num_logits=0)])
        return super().propose(live, chosen)
"""


@pytest.fixture
def install_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a package whose drafter is called ``foreign``."""

    def installed(source: str, kind: str, claim: object = None) -> None:
        entries = f"foreign = {NAME}:{kind}"
        install(tmp_path, NAME, entries, source.replace("CLAIM", repr(claim)))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, NAME, raising=False)

    return installed


def check_served(
    drafters: tuple[str, ...],
    *,
    degraded: tuple[str, ...] = (),
    slow: tuple[str, ...] = (),
    max_tokens: int = 20,
) -> Harness:
    """Two requests each, one after the other so that rows move; neighbours draft as if they were alone."""
    prompt = [*range(10), 0]
    alone = Harness("F3")
    alone.submit("model", prompt, max_tokens=max_tokens, drafter="model", gamma=3)
    alone.run()
    harness = Harness("F3")
    for number, name in enumerate((*drafters, "model", *drafters)):
        options = {"max_tokens": max_tokens - number, "drafter": name, "gamma": 3}
        harness.submit(f"{number}-{name}", prompt, **options)
    harness.run()
    harness.check_is_idle()
    expected = alone.tokens("model")
    for label in harness.events:
        found = harness.tokens(label)
        assert found == expected[: len(found)], label
        name = label.split("-")[1]
        report = harness.finished(label).report
        assert report.off_reason == ("DEGRADED" if name in degraded else None), label
        if name not in (*degraded, *slow):
            assert report.num_accepted > 0, label
    return harness


@pytest.mark.parametrize("claim", [-5, 0, 10**6, 2.5, "much"])
def test_claims_of_a_drafter_without_the_model_are_ignored(install_as, claim: object) -> None:
    install_as(documented_example() + CLAIMS, "Claiming", claim)
    check_served(("foreign", "foreign+model", "model+foreign"))


@pytest.mark.parametrize("claim", [-5, 0, None, 1, 10**6])
def test_claims_of_a_drafter_with_the_model_are_held_to_what_its_slots_hold(
    install_as, claim: object
) -> None:
    """Claiming too little, it never catches up with a prompt of several chunks."""
    install_as(USES_MODEL, "Claiming", claim)
    names = ("foreign", "foreign+lookup")
    check_served(names, slow=() if claim == 10**6 else names)


@pytest.mark.parametrize(
    ("tokens", "degraded"),
    [("map(np.int64, chain)", ()), ("map(float, chain)", ("foreign", "model/foreign"))],
)
def test_tokens_are_integers_whatever_they_were(
    install_as, tokens: str, degraded: tuple[str, ...]
) -> None:
    source = "import numpy as np\n" + documented_example()
    install_as(source.replace("return tuple(chain)", f"return tuple({tokens})"), "SuccessorDrafter")
    harness = check_served(("foreign", "model/foreign"), degraded=degraded)
    for name in harness.events:
        assert {type(token) for token in harness.tokens(name)} == {int}


def test_a_cache_that_was_never_filled_is_not_taken_for_full(install_as) -> None:
    install_as(USES_MODEL, "Idle")
    harness = Harness("F3")
    harness.submit("a", drafter="foreign", gamma=3)
    harness.submit("b", drafter="model", gamma=3)
    while harness.worker.run_step():
        harness.check_invariants()
    assert harness.tokens("a") == harness.tokens("b")
    assert harness.finished("b").report.off_reason is None


def test_who_changes_rows_of_others_loses_its_own(install_as) -> None:
    """The neighbour's drafts are made anew from the text, and are as good as before."""
    install_as(USES_MODEL, "Intruding")
    check_served(("foreign",), degraded=("foreign",))


class Reading:
    """Reads a source of its own for a row that it was not asked for."""

    capabilities = ModelDrafter.capabilities

    def __init__(self, engine: CountingEngine) -> None:
        self._engine = engine

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        (other,) = {0, 1} - {*chosen}
        self._engine.read([Source(slot=other, tokens=(3, 3))])
        return [Draft(tokens=())]


@pytest.mark.parametrize("num_computed", [0, 1])
def test_who_reads_a_source_for_rows_of_others_is_noticed(num_computed: int) -> None:
    counting = CountingEngine(ScriptedEngine(PAIRS["S4"][2], bounds_of("S4")))
    counting.read([Source(slot=slot, tokens=(1, 2)) for slot in range(2)])
    drafter = GuardedDrafter(Reading(counting), counting.held)
    live = [replace(row([0, 1, 2]), num_computed=num_computed)] * 2
    with pytest.raises(EngineError, match="slot 1: a drafter that was not asked"):
        drafter.propose(live, [0])


def test_a_source_that_is_still_unread_is_not_reported_as_read() -> None:
    unread = replace(row([0, 1]), num_computed=-1)
    assert held_to(Draft(tokens=()), unread, {0: 0}, 0).num_computed is None
    assert held_to(Draft(tokens=(), num_computed=1), unread, {0: 1}, 0).num_computed == 1
    assert held_to(Draft(tokens=(), num_computed=0), unread, {0: -1}, 0).num_computed == 0


def test_slots_are_not_a_drafters_to_move_trim_or_free() -> None:
    engine = CountingEngine(ScriptedEngine(counting_logits, limits(10)))
    for call in (
        lambda: engine.move_slot(0, 1, 0),
        lambda: engine.trim([]),
        engine.close,
    ):
        with pytest.raises(EngineError, match="drafters"):
            call()
    assert engine.limits.vocab_size == 10
    assert engine.is_row_invariant
    assert not engine.packs_rows
