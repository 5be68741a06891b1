"""What reads of sources cost, and that steps are measured behind one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from outrider.engines.base import EngineError, FloatArray, Source, Span
from outrider.runtime.calibration.calibrate import Budget
from outrider.runtime.calibration.reads import USUAL_LENGTH, measure_reads, read_everywhere
from outrider.runtime.calibration.store import table_from_json, table_to_json
from outrider.runtime.gamma.costs import StepPrices

from tests.runtime.calibration.test_calibrate import LIMITS, PricedEngine, Ticker, measured


class Reading(PricedEngine):
    """Takes a known time per read, and no text of a slot without a source."""

    limits = replace(LIMITS, max_source=300)

    def __init__(self, ticker: Ticker, token_s: float) -> None:
        super().__init__(ticker, 0.5, 0.0)
        self._token_s = token_s
        self.sources: dict[int, int] = {}

    def read(self, sources: Sequence[Source]) -> None:
        longest = max(len(source.tokens) for source in sources)
        self._ticker.now += 0.25 + self._token_s * longest * len(sources)
        self.sources |= {source.slot: len(source.tokens) for source in sources}

    def share_source(self, slot: int, destinations: Sequence[int]) -> None:
        self.sources |= dict.fromkeys(destinations, self.sources[slot])

    def trim(self, lengths: Sequence[int | None]) -> None:
        assert not lengths
        self.sources.clear()

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        if any(self.sources.get(span.slot) != USUAL_LENGTH for span in spans):
            raise EngineError("a slot has no source of the usual length")
        return super().extend(spans)


def test_the_table_has_what_reads_took() -> None:
    ticker = Ticker()
    target, draft = Reading(ticker, 0.01), Reading(ticker, 0.002)
    table = measured(ticker, target, draft, Budget(total_s=1e9, repeats=2))
    assert table.read is not None and table.draft_read is not None
    assert (table.read.batches, table.read.tokens) == ((1, 4), (16, 64, 256))
    for rows, length in ((1, 16), (4, 256), (2, 100)):
        assert table.read.extend_s(rows, length, 0) == pytest.approx(0.25 + 0.01 * rows * length)
    assert table_from_json(table_to_json(table)) == table
    prices = StepPrices(table, max_gamma=8, packs_rows=False)
    assert prices.read_s(100) == pytest.approx(0.25 + 0.2)
    assert set(target.sources.values()) == {USUAL_LENGTH}


def test_a_draft_is_measured_behind_its_target() -> None:
    ticker = Ticker()
    target = Reading(ticker, 0.01)

    class Behind(Reading):
        """Takes as long again where the target has not read the source."""

        def read(self, sources: Sequence[Source]) -> None:
            self._ticker.now += target.sources != {one.slot: len(one.tokens) for one in sources}
            super().read(sources)

    target.trim(())
    found = measure_reads(Behind(ticker, 0.002), 1e9, ticker, target=target)
    assert found is not None
    assert found.extend_s(1, 64, 0) == pytest.approx(0.25 + 0.002 * 64)
    assert not target.sources


def test_a_slow_encoder_is_measured_with_one_row() -> None:
    ticker = Ticker()
    found = measure_reads(Reading(ticker, 0.01), 0.0, ticker)
    assert found is not None
    assert found.batches == (1,)
    assert found.extend_s(4, 16, 0) == pytest.approx(4 * (0.25 + 0.16))


def test_short_sources_are_measured_up_to_the_longest() -> None:
    engine = Reading(Ticker(), 0.01)
    engine.limits = replace(LIMITS, max_source=20, max_batch=1)
    found = measure_reads(engine, 1e9, engine._ticker)
    assert found is not None
    assert (found.batches, found.tokens) == ((1,), (16, 20))
    read_everywhere(engine)
    assert engine.sources == {0: 20}


def test_a_model_without_an_encoder_reads_nothing() -> None:
    ticker = Ticker()
    engine = PricedEngine(ticker, 0.5, 0.0)
    assert measure_reads(engine, 1e9, ticker) is None
    read_everywhere(engine)
    table = measured(ticker, engine, None, Budget(total_s=1e9, repeats=2))
    assert (table.read, table.draft_read) == (None, None)
    assert StepPrices(table, max_gamma=8, packs_rows=False).read_s(100) == 0.0


def test_a_table_from_before_there_were_reads_is_taken() -> None:
    ticker = Ticker()
    table = measured(ticker, PricedEngine(ticker, 0.5, 0.0), None, Budget(total_s=1e9, repeats=2))
    text = (
        table_to_json(table)
        .replace('"read": null', '"is_old": 0')
        .replace('"draft_read": null,', "")
    )
    assert table_from_json(text.replace('  "is_old": 0,\n', "")) == table
