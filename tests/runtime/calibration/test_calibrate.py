"""What is measured is what the engines take, and it is measured once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.calibration import store
from outrider.runtime.calibration.calibrate import Budget, calibrate
from outrider.runtime.calibration.host import measure_host
from outrider.runtime.calibration.store import load_or_measure, table_from_json, table_name
from outrider.runtime.gamma.costs import CostTable, RowKind
from outrider.runtime.gamma.tree_prices import node_cost

from tests.runtime.markov import LetterDecoder

LIMITS = EngineLimits(max_batch=8, max_context=600, max_extend=300, vocab_size=10)


class Ticker:
    """A clock that only its engines move; every reading is distinct work done so far."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PricedEngine:
    """Takes a known time per extend on the ticker's clock; its cache grows as a real one's does."""

    def __init__(self, ticker: Ticker, row_token_s: float, position_s: float) -> None:
        self._ticker = ticker
        self._row_token_s = row_token_s
        self._position_s = position_s
        self.capacity = 128
        self.num_extends = 0

    limits = LIMITS
    is_row_invariant = True
    packs_rows = False
    token_bytes = 0

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        width = max(2, max(len(span.tokens) for span in spans))
        needed = max(span.start for span in spans) + width
        while self.capacity < needed:
            self.capacity *= 2
        rows = len(spans)
        self._ticker.now += 1.0 + self._row_token_s * rows * width
        self._ticker.now += self._position_s * rows * (self.capacity - 128)
        self.num_extends += 1
        return np.zeros((rows, width, 10), dtype=np.float32)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        raise AssertionError("no path is kept")

    def move_slot(self, source: int, destination: int, length: int) -> None:
        raise AssertionError("nothing is moved")

    def close(self) -> None:
        pass


def measured(
    ticker: Ticker, target: PricedEngine, draft: PricedEngine | None, budget: Budget
) -> CostTable:
    return calibrate(
        target=target,
        draft=draft,
        sampler=CpuSampler(max_batch=8, max_gamma=8, vocab_size=10),
        decoder=LetterDecoder(),
        max_gamma=8,
        budget=budget,
        clock=ticker,
    )


def test_the_table_gives_back_what_the_engines_took() -> None:
    ticker = Ticker()
    target = PricedEngine(ticker, 0.5, 0.001)
    draft = PricedEngine(ticker, 0.05, 0.0)
    table = measured(ticker, target, draft, Budget(total_s=1e9, repeats=2))
    assert table.draft is not None
    assert table.catch_up is not None
    assert table.target.batches == (1, 2, 4, 8)
    assert table.target.tokens == (1, 2, 3, 5, 9)
    for batch in (1, 3, 8):
        for tokens in (2, 4, 9):
            assert table.target.extend_s(batch, tokens, 128) == pytest.approx(
                1.0 + 0.5 * batch * tokens
            )
    assert table.target.extend_s(4, 1, 128) == pytest.approx(5.0)  # as wide as two
    assert table.target.extend_s(4, 2, 512) == pytest.approx(5.0 + 0.001 * 4 * 384)
    assert table.draft.extend_s(2, 1, 512) == pytest.approx(1.2)
    assert table.catch_up.extend_s(1, 40, 128) == pytest.approx(3.0)
    assert table.capacities == (128, 192, 256, 384, 512, 768, 900)
    assert set(table.host.rows) == set(RowKind)


class TickingSampler(CpuSampler):
    """Takes a known time per row that it judges."""

    def __init__(self, ticker: Ticker, row_s: float) -> None:
        super().__init__(max_batch=8, max_gamma=8, vocab_size=10)
        self._ticker, self._row_s = ticker, row_s

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        self._ticker.now += self._row_s * len(rows)
        return super().judge(logits, rows)


def test_the_hosts_time_is_that_of_single_steps() -> None:
    ticker = Ticker()
    costs = measure_host(LIMITS, TickingSampler(ticker, 0.25), LetterDecoder(), 8, ticker)
    for kind in RowKind:
        assert costs.rows[kind].row_s == pytest.approx(0.25)
        assert costs.rows[kind].token_s == pytest.approx(0.0, abs=1e-9)


def test_a_slow_machine_is_measured_at_small_batches_only() -> None:
    ticker = Ticker()
    table = measured(ticker, PricedEngine(ticker, 1.0, 0.0), None, Budget(total_s=10.0, repeats=5))
    assert table.draft is None
    assert table.catch_up is None
    assert table.target.batches == (1,)
    assert table.target.extend_s(8, 2, 128) > table.target.extend_s(1, 2, 128)


def test_a_table_is_measured_once_and_again_on_demand(tmp_path: Path) -> None:
    ticker = Ticker()
    engine = PricedEngine(ticker, 0.5, 0.0)
    budget = Budget(total_s=1e9, repeats=1)
    path = tmp_path / "made" / "table.json"

    def measure() -> CostTable:
        return measured(ticker, engine, None, budget)

    first = load_or_measure([path], measure)
    num_extends = engine.num_extends
    assert load_or_measure([path], measure) == first
    assert engine.num_extends == num_extends
    load_or_measure([path], measure, is_refreshed=True)
    assert engine.num_extends > num_extends
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


class Disturbed(PricedEngine):
    """Calls take several times as long, each its own time."""

    def __init__(self, ticker: Ticker) -> None:
        super().__init__(ticker, 0.5, 0.0)
        self._rng = np.random.default_rng(0)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        logits = super().extend(spans)
        self._ticker.now += float(self._rng.exponential(scale=20.0))
        return logits


def test_a_table_in_doubt_says_so_and_is_measured_again_where_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticker = Ticker()
    budget = Budget(total_s=1e9, repeats=8)
    path = tmp_path / "table.json"
    noisy = load_or_measure([path], lambda: measured(ticker, Disturbed(ticker), None, budget))
    assert not noisy.is_settled
    assert "disagree" in caplog.text
    assert "--refresh-costs" in caplog.text
    calm = measured(ticker, PricedEngine(ticker, 0.5, 0.0), None, budget)
    assert load_or_measure([path], lambda: calm) == noisy
    assert load_or_measure([path], lambda: calm, is_refreshed=True) == calm
    assert load_or_measure([path], lambda: noisy) == calm


def test_target_and_draft_are_called_in_turns() -> None:
    """As in service, where each pushes the other's weights out of the caches."""
    ticker = Ticker()
    log: list[str] = []

    class Logged(PricedEngine):
        def __init__(self, name: str) -> None:
            super().__init__(ticker, 0.5, 0.0)
            self._name = name

        def extend(self, spans: Sequence[Span]) -> FloatArray:
            log.append(self._name)
            return super().extend(spans)

    measured(ticker, Logged("t"), Logged("d"), Budget(total_s=1e9, repeats=2))
    # 4 batches of 4 lengths, once to warm up and twice to be timed.
    assert "".join(log).startswith("tdd" * (4 * 4 * 3))


def test_a_folder_that_cannot_be_written_passes_its_table_to_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticker = Ticker()
    table = measured(ticker, PricedEngine(ticker, 0.5, 0.0), None, Budget(repeats=1))
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file" / "costs" / "a.json", tmp_path / "cache" / "a.json"]
    assert load_or_measure(paths, lambda: table) == table
    assert table_from_json(paths[1].read_text()) == table
    paths[1].write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert load_or_measure(paths[1:], lambda: table) == table
    assert "cannot be used" in caplog.text
    assert table_from_json(paths[1].read_text()) == table


def test_only_abandoned_tables_are_removed_beside_a_new_one(tmp_path: Path) -> None:
    ticker = Ticker()
    table = measured(ticker, PricedEngine(ticker, 0.5, 0.0), None, Budget(repeats=1))
    name = "0123456789abcdef.json"
    abandoned, recent = tmp_path / f"{name}.1.new", tmp_path / f"{name}.2.new"
    foreign = [tmp_path / "backup.new", tmp_path / "notes.json.1.new"]
    for path in (abandoned, recent, *foreign):
        path.write_text("")
    for path in (abandoned, *foreign):
        os.utime(path, (0, 0))
    gone = tmp_path / f"{name}.3.new"
    gone.symlink_to(tmp_path / "nowhere")
    load_or_measure([tmp_path / name], lambda: table)
    assert {*tmp_path.iterdir()} == {tmp_path / name, recent, gone, *foreign}


def test_other_models_devices_and_threads_have_other_tables() -> None:
    def name(**change: object) -> str:
        known = {"files": ("a", "b"), "device": "cpu", "num_threads": 2, "max_batch": 8}
        return table_name(**{**known, **change})

    assert name() == name(files=("b", "a"))
    changed = {
        name(), name(files=("a", "c")), name(device="cuda"), name(num_threads=4), name(max_batch=9),
    }  # fmt: skip
    assert len(changed) == 5


class TreeEngine(PricedEngine):
    """Trees cost a third more per token than chains of as many rows."""

    limits = replace(LIMITS, max_tree_nodes=33)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        if spans[0].parents is not None:
            assert all(len(span.parents or ()) == len(span.tokens) - 1 for span in spans)
            self._ticker.now += self._row_token_s / 3 * len(spans) * len(spans[0].tokens)
        return super().extend(spans)


def test_passes_over_trees_are_measured_as_what_they_are() -> None:
    ticker = Ticker()
    budget = Budget(total_s=1e9, repeats=2)
    table = measured(ticker, TreeEngine(ticker, 0.3, 0.0), None, budget)
    assert table.trees is not None
    assert (table.trees.batches, table.trees.tokens) == ((1, 8), (3, 9, 17, 33))
    for rows in (1, 3, 8):
        for tokens in (3, 17, 25):
            found = table.trees.extend_s(rows, tokens, 128)
            assert found == pytest.approx(1.0 + 0.4 * rows * tokens)
    assert node_cost(table, 16, 8) == pytest.approx(
        (0.4 * 8 * 17 - 0.3 * 8 * 2) / 16 / (1.0 + 0.3 * 8 * 2 + table.host.step_s)
    )
    assert measured(ticker, PricedEngine(ticker, 0.3, 0.0), None, budget).trees is None


def test_a_machine_that_slows_down_makes_trees_no_dearer_beside_chains() -> None:
    """What is timed is held against plain passes of the same moment."""

    class Slowing(TreeEngine):
        is_slow = False

        def extend(self, spans: Sequence[Span]) -> FloatArray:
            self.is_slow = self.is_slow or spans[0].parents is not None
            began = self._ticker.now
            logits = super().extend(spans)
            self._ticker.now += 3.0 * (self._ticker.now - began) * self.is_slow
            return logits

    budget = Budget(total_s=1e9, repeats=2)
    tables = [
        measured(ticker, kind(ticker, 0.3, 0.0), None, budget)
        for kind, ticker in ((TreeEngine, Ticker()), (Slowing, Ticker()))
    ]
    steady, slowed = (node_cost(table, 16, 8) for table in tables)
    assert slowed == pytest.approx(steady)


def test_a_plain_pass_that_is_slow_behind_the_widest_tree_makes_trees_no_cheaper() -> None:
    """Caches are cold behind a wide pass: a plain pass of 10M parameters then takes up to twice as long."""

    class ColdBehindTrees(TreeEngine):
        is_cold = False

        def extend(self, spans: Sequence[Span]) -> FloatArray:
            self._ticker.now += 5.0 * self.is_cold
            self.is_cold = len(spans[0].tokens) == 33
            return super().extend(spans)

    budget = Budget(total_s=1e9, repeats=2)
    tables = [
        measured(ticker, kind(ticker, 0.3, 0.0), None, budget)
        for kind, ticker in ((TreeEngine, Ticker()), (ColdBehindTrees, Ticker()))
    ]
    warm, cold = (table.trees for table in tables)
    assert warm is not None
    assert cold is not None
    assert np.array(cold.seconds) == pytest.approx(np.array(warm.seconds))


def test_starts_that_race_for_one_folder_leave_one_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight measure at once; each gets a table, and whoever looks meanwhile finds none or a whole one."""
    # Threads in place of processes.
    monkeypatch.setattr(store.os, "getpid", threading.get_ident)
    ticker = Ticker()
    engines = PricedEngine(ticker, 0.5, 0.001), PricedEngine(ticker, 0.05, 0.0)
    table = measured(ticker, *engines, Budget(total_s=1e9, repeats=2))
    path, begun, found = tmp_path / "costs" / "table.json", threading.Barrier(8), list[CostTable]()

    def measure() -> CostTable:
        begun.wait(60)
        return table

    threads = [
        threading.Thread(target=lambda: found.append(load_or_measure([path], measure)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert table_from_json(path.read_text("utf-8")) == table
    assert found == [table] * 8
    assert [one.name for one in path.parent.iterdir()] == ["table.json"]
