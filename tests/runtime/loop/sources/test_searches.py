"""Beam searches over a source: read once, and every slot of the search has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import BeamParams, SpeculationParams
from outrider.runtime.loop.beams.beam import BeamRules
from outrider.runtime.loop.beams.cache import BeamCache

from tests.runtime.loop.beams.test_beam import plain
from tests.runtime.sourced import (
    PAIRS,
    POISON,
    PREFIXES,
    Poisoned,
    bounds_of,
    source_of,
    sourced,
    submit,
)


def expected(name: int, *, max_tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and sums, best first, of three beams by the plain implementation of the tests of the rules."""
    vocab_size, logits_of, _ = PAIRS["S4"]
    source, prefix = source_of(name, vocab_size), PREFIXES[name % len(PREFIXES)]

    def row_of(tokens: tuple[int, ...]) -> np.ndarray:
        row = logits_of(source, (*prefix, *tokens)).astype(np.float64)
        return row - np.log(np.exp(row).sum())

    return plain(row_of, BeamRules(num_beams=3, max_tokens=max_tokens))


def test_a_search_is_that_of_each_request_alone_whoever_stands_beside() -> None:
    beams = BeamParams(num_beams=3, num_results=3)

    def found(names: Sequence[int], gamma: int) -> dict[int, object]:
        harness = sourced(max_batch=12)
        for name in names:
            params = SpeculationParams(drafter="model", gamma=gamma)
            options = {"beams": beams, "max_tokens": 8 + name % 3}
            submit(harness, "S4", name, 0.0, params, **(options if name % 4 else {}))
        harness.run()
        harness.check_is_idle()
        return {
            name: (harness.finished(str(name)).beams, harness.tokens(str(name))) for name in names
        }

    alone = {name: found([name], 0)[name] for name in range(12)}
    for name in (name for name in alone if name % 4):
        wanted = expected(name, max_tokens=8 + name % 3)
        assert [one.tokens for one in alone[name][0]] == [tokens for tokens, _ in wanted]
        sums = [one.log_prob for one in alone[name][0]]
        assert sums == pytest.approx([total for _, total in wanted], abs=1e-5)
    assert found(range(12), 0) == alone
    assert found(range(11, -1, -1), 2) == alone


def test_searches_that_end_move_others_with_their_sources() -> None:
    """A search whose prefix is not fed yet holds its source alone when its slots move."""
    beams = BeamParams(num_beams=2)
    prompt = {"prompt": (0,) * 40, "source_tokens": (1, 2, 3), "max_tokens": 5, "beams": beams}
    alone = sourced(max_batch=6)
    alone.submit("long", **prompt)
    alone.run()
    harness = sourced(max_batch=6)
    harness.submit("short", (1,), source_tokens=(3,), max_tokens=2, beams=beams)
    harness.submit("long", **prompt)
    # The other ends in the step that reads this one's source.
    for _ in range(2):
        harness.worker.run_step()
    (search,) = harness.worker._rows.searches
    assert (search.request.state, search.request.cache.num_computed) == (State.PREFILLING, 0)
    assert search.slots == [4, 5]
    harness.run()
    assert harness.finished("short").beams
    assert harness.finished("long").beams == alone.finished("long").beams


@pytest.mark.parametrize("failing", [0, 1])
def test_a_search_whose_source_fails_once_is_answered_all_the_same(failing: int) -> None:
    found = []
    for is_failing in (False, True):
        harness = sourced(max_batch=8)
        if is_failing:
            harness.target.fail_reads_at(failing)
        for name in "ab":
            harness.submit(
                name,
                (0, 1),
                source_tokens=(ord(name) % 4, 1, 2),
                beams=BeamParams(num_beams=3),
                max_tokens=6,
            )
        harness.run()
        found.append([harness.finished(name).beams for name in "ab"])
    assert found[0] == found[1]


def test_every_slot_of_a_search_has_its_source() -> None:
    """C3: also those that no text was copied to yet."""
    engine = ScriptedEngine(PAIRS["S4"][1], bounds_of("S4"))
    cache = BeamCache(engine, (0,), [3, 1, 4])
    cache.read((1, 2))
    assert [engine.source_of(slot) for slot in range(5)] == [(), (1, 2), (), (1, 2), (1, 2)]


def test_a_search_whose_source_cannot_be_read_ends_alone() -> None:
    harness = sourced(target=Poisoned(), max_batch=5)
    harness.submit("good", (0,), source_tokens=(1, 2), beams=BeamParams(num_beams=2), max_tokens=6)
    harness.submit("poison", (0,), source_tokens=POISON, beams=BeamParams(num_beams=2))
    harness.run()
    assert harness.error("poison").reason in ("REQUEST_QUARANTINED", "ENGINE_FAILED")
    assert harness.finished("good").beams
    harness.check_is_idle()
