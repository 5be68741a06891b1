"""What choosing gamma costs: processor time of the steering against the tabled time of the steps taken, by batch.

Engines compute nothing, but their tabled time passes on the clock, so that decisions are as rare as in service.
"worst" decides anew in every step, as when rows come and go all the time where drafts pay; "steady" as the controller
does while rows stay; "idle" where nothing pays, so that the step is one that speculation off would run, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.bundle.manifest import load_bundle
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.calibration.host_costs import NullEngine
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.gamma.costs import CostTable, ModelCosts
from outrider.runtime.gamma.pace import Pace
from outrider.runtime.gamma.steering import Steering
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.opening import ServeOptions, bundle_costs
from outrider.runtime.serving.tokenizer import TokenizersCodec
from rich.console import Console
from rich.table import Table

from scripts.bench.tools.results import Recorder, Row

STEPS, WARM_STEPS = 400, 40


DEAR = 1000.0
"""Times the price of a draft call, so that nothing pays."""


class PacedClock:
    """Time that passed, and the time that engines say they took."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return time.perf_counter() + self.ahead_s


class PacedEngine(NullEngine):
    """An engine that computes nothing and takes its tabled time."""

    clock: PacedClock
    costs: ModelCosts

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """[B, R, V] float32, the same row everywhere."""
        tokens = max(len(span.tokens) for span in spans)
        self.clock.ahead_s += self.costs.extend_s(len(spans), tokens, self.costs.capacity)
        return super().extend(spans)


class TimedSteering(Steering):
    """A steering that keeps the seconds it took of every step."""

    forces = False

    def choose(self, live: Sequence[Any], caps: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Choose and take the time."""
        if self.forces:
            self._pace = Pace(self._settings)
        began = time.thread_time()
        chosen = super().choose(live, caps)
        self.taken = [*getattr(self, "taken", []), time.thread_time() - began]
        return chosen

    def observe(self, *arguments: Any) -> None:
        """Observe and take the time."""
        began = time.thread_time()
        super().observe(*arguments)
        self.taken[-1] += time.thread_time() - began


def steering_s(
    table: CostTable, rows: int, codec: TokenizersCodec, *, forces: bool
) -> tuple[float, float]:
    """Mean seconds per step of steering, where it is forced the slowest tenth left out, and of engines."""
    assert table.draft is not None
    limits = EngineLimits(max_batch=rows, max_context=8192, max_extend=64, vocab_size=256)
    row = np.random.default_rng(0).normal(size=256).astype(np.float32)
    clock = PacedClock()
    engines = []
    for costs in (table.target, table.draft):
        engine = PacedEngine(limits, row, max_wanted=9)
        engine.clock, engine.costs = clock, costs
        engines.append(engine)
    worker = Worker(
        target=engines[0], draft=engines[1], sampler=CpuSampler(max_batch=rows, max_gamma=8, vocab_size=256),
        config=ServerConfig(max_running=rows), max_gamma=8, decoder=codec, costs=table, clock=clock,
    )  # fmt: skip
    steering = worker._parts.steering
    assert steering is not None
    steering.__class__ = TimedSteering
    steering.forces = forces  # type: ignore[attr-defined]
    for index in range(rows):
        spec = RequestSpec(
            internal_id=str(index), request_id=str(index), prompt_tokens=(0,), seed=index, max_tokens=8000,
            params=SamplingParams(temperature=0.0),
        )  # fmt: skip
        worker.submit(spec, lambda event: None)
    for _ in range(STEPS):
        worker.run_step()
    all_taken = steering.taken  # type: ignore[attr-defined]
    taken = sorted(all_taken[WARM_STEPS:])
    took_s = statistics.fmean(taken[: -len(taken) // 10] if forces else taken)
    return took_s, clock.ahead_s / len(all_taken)


def main(
    bundle: Path,
    batches: str = "1,8,32",
    costs: Annotated[Path, typer.Option(help="folder for measured step costs")] = Path("costs"),
    max_batch: int = 32,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Print steering time and its share of the steps taken."""
    recorder = Recorder("controller", "time of choosing gamma against the steps taken", threads)
    loaded = load_bundle(bundle)
    codec = TokenizersCodec(bundle / "tokenizer.json")
    manifest = loaded.manifest
    sampler = CpuSampler(
        max_batch=max_batch, max_gamma=manifest.max_gamma, vocab_size=manifest.target.vocab_size
    )
    config = ServerConfig(max_running=max_batch, num_threads=threads)
    options = ServeOptions(costs_folder=costs, config=config)
    table = bundle_costs(loaded, options, sampler, codec, max_batch)
    shown = Table(title=f"{bundle.name}: choosing gamma")
    for head in ("batch", "plain step ms", *(
        head for way in ("steady", "worst", "idle") for head in (f"{way} us", "of ms", "share %")
    )):  # fmt: skip
        shown.add_column(head, justify="right")
    results = []
    for rows in (int(one) for one in batches.split(",")):
        plain_s = table.target.extend_s(rows, 1, table.capacities[0]) + table.host.step_s
        cells: list[str] = []
        figures = {"plain_step_ms": 1e3 * plain_s}
        assert table.draft is not None
        seconds = tuple(tuple(DEAR * one for one in line) for line in table.draft.seconds)
        dear = replace(table, draft=replace(table.draft, seconds=seconds))
        ways = {"steady": (table, False), "worst": (table, True), "idle": (dear, False)}
        for name, (costs_of_way, forces) in ways.items():
            took_s, engines_s = steering_s(costs_of_way, rows, codec, forces=forces)
            step_s = engines_s + table.host.step_s
            if costs_of_way is dear:
                # Nothing is drafted but now and then to explore, at a thousand times its price.
                step_s = plain_s
            figures |= {
                f"{name}_us": 1e6 * took_s, f"{name}_step_ms": 1e3 * step_s, f"{name}_share": took_s / step_s,
            }  # fmt: skip
            cells += [f"{1e6 * took_s:.0f}", f"{1e3 * step_s:.2f}", f"{100 * took_s / step_s:.2f}"]
        shown.add_row(str(rows), f"{1e3 * plain_s:.2f}", *cells)
        results.append(Row(case={"bundle": bundle.name, "batch": rows}, figures=figures))
    Console(width=120).print(shown)
    recorder.write(json_out, results, {"steps": STEPS})


if __name__ == "__main__":
    typer.run(main)
