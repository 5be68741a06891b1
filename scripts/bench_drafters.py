"""Every drafter on the same prompts in one run: tokens/s, tokens per target pass, host work of drafting.

Three tasks: completing code; editing, where the target answers a prompt that holds its own answer to nearly the same
prompt; and noise, random tokens completed at a high temperature, where nothing is ever found again. Rounds are
interleaved and medians reported, so that a disturbance hits all drafters alike. gamma is fixed: no controller hides
what a drafter costs where it does not pay.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import runtime.step
from engines.laws import SamplingLaw
from runtime.core.drafting import DraftingConfig, HistoryScope
from runtime.core.params import Event, Progressed, RequestSpec, SpeculationParams
from runtime.drafters import DRAFTER_NAMES
from runtime.drafters.suffix_array import write_datastore
from scripts.bench_common import Rig, code_prompts, open_rig
from scripts.bench_results import Recorder, row_of

COMPOSED = ("model/lookup", "model/phrases", "lookup+model")
TASKS = {"code": 0.0, "edit": 0.0, "noise": 1.5}
CORPUS_PROMPTS = 200
NOISE_LENGTH = 60
EDITED_TOKENS = 10
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One drafter on one task in one round.

    Attributes:
        host_share: time in drafting and its bookkeeping, without engine and sampler, of the whole.
    """

    task: str
    drafter: str
    tokens_per_s: float
    tokens_per_step: float
    utilization: float | None
    host_share: float


@dataclass(slots=True)
class HostClock:
    """Seconds spent around the drafters, less what the draft model and the sampler took of them."""

    rig: Rig
    total_s: float = 0.0

    def watch(self, name: str) -> None:
        """Take the time of a function that the step calls."""
        inner: Callable[..., Any] = getattr(runtime.step, name)

        def timed(*args: Any, **options: Any) -> Any:
            began, other = time.perf_counter(), self._other_s()
            try:
                return inner(*args, **options)
            finally:
                self.total_s += time.perf_counter() - began - (self._other_s() - other)

        setattr(runtime.step, name, timed)

    def _other_s(self) -> float:
        return self.rig.engine_s() + self.rig.sampler.total_s


def answer_of(rig: Rig, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy answer to a prompt, without drafts."""
    events: list[Event] = []
    rig.next_id += 1
    name = f"answer-{rig.next_id}"
    spec = RequestSpec(
        internal_id=name,
        request_id=name,
        prompt_tokens=tuple(prompt),
        law=SamplingLaw(temperature=0.0),
        seed=0,
        max_tokens=max_tokens,
        speculation=SpeculationParams(is_enabled=False),
    )
    rig.worker.submit(spec, events.append)
    while rig.worker.run_step():
        pass
    return [one.token for event in events if isinstance(event, Progressed) for one in event.tokens]


def edit_task(rig: Rig, prompt: list[int], max_tokens: int) -> tuple[list[int], tuple[int, ...]]:
    """A text with the target's own answer to it, then the text again without its first tokens.

    The target goes on much as it did before, with small changes: it repeats given code.
    """
    answer = answer_of(rig, prompt, max_tokens)
    return [*prompt, *answer, *prompt[EDITED_TOKENS:]], tuple(answer)


def tasks_of(
    rig: Rig, count: int, max_tokens: int
) -> dict[str, list[tuple[list[int], tuple[int, ...]]]]:
    """Per task, prompts and reference tokens."""
    codes = code_prompts(count)
    rng = random.Random(1)
    vocab_size = rig.target.limits.vocab_size

    def ids(text: str) -> list[int]:
        return list(rig.tokenizer.encode(text))

    noise = [[rng.randrange(5, vocab_size) for _ in range(NOISE_LENGTH)] for _ in codes]
    return {
        "code": [(ids(code), tuple(ids(code))) for code in codes],
        "edit": [edit_task(rig, ids(code), max_tokens) for code in codes],
        "noise": [(prompt, tuple(prompt)) for prompt in noise],
    }


def measure(
    rig: Rig,
    clock: HostClock,
    task: str,
    prompts: Sequence[tuple[list[int], tuple[int, ...]]],
    drafter: str,
    gamma: int,
    max_tokens: int,
    batch: int,
) -> Cell:
    host_before, wall_s, num_output, reports = clock.total_s, 0.0, 0, []
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        # One reference for the group: the rig gives all requests of a run the same parameters.
        reference = group[0][1] if "reference" in drafter else ()
        params = SpeculationParams(
            is_enabled=drafter != "none", drafter=drafter, gamma=gamma, reference_tokens=reference
        )
        law = SamplingLaw(temperature=TASKS[task])
        finished, took_s = rig.run([ids for ids, _ in group], law, params, max_tokens)
        wall_s += took_s
        num_output += sum(one.num_output for one in finished)
        reports += [one.report for one in finished]
    drafted = sum(report.num_drafted for report in reports)
    return Cell(
        task=task,
        drafter=drafter,
        tokens_per_s=num_output / wall_s,
        tokens_per_step=num_output / sum(report.num_steps for report in reports),
        utilization=sum(report.num_accepted for report in reports) / drafted if drafted else None,
        host_share=(clock.total_s - host_before) / wall_s,
    )


def open_with_corpus(
    bundle: Path, batch: int, scratch: Path, history: HistoryScope, threads: int
) -> Rig:
    """A rig whose datastore holds code prompts other than those that are measured."""
    store = scratch / "datastore"
    if not store.exists():
        plain = open_rig(bundle, max_batch=1, num_threads=threads)
        texts = [plain.tokenizer.encode(t) for t in code_prompts(CORPUS_PROMPTS)[len(TASKS) * 8 :]]
        write_datastore(texts, store, vocab_size=plain.target.limits.vocab_size)
    drafting = DraftingConfig(datastore=str(store), history_scope=history)
    return open_rig(bundle, max_batch=batch, num_threads=threads, drafting=drafting)


def show(medians: Sequence[Cell], title: str) -> None:
    plain = {cell.task: cell.tokens_per_s for cell in medians if cell.drafter == "none"}
    table = Table(title=title)
    for head in ("task", "drafter", "tokens/s", "speed-up", "tokens/step", "kept", "host share"):
        table.add_column(head, justify="left" if head in ("task", "drafter") else "right")
    for cell in medians:
        table.add_row(
            cell.task, cell.drafter, f"{cell.tokens_per_s:.0f}", f"{cell.tokens_per_s / plain[cell.task]:.2f}",
            f"{cell.tokens_per_step:.2f}", "-" if cell.utilization is None else f"{cell.utilization:.2f}",
            f"{cell.host_share:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main(
    bundle: Path,
    scratch: Annotated[Path, typer.Option(help="Folder for the datastore.")],
    drafters: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    gamma: int = 4,
    batch: int = 1,
    num_prompts: int = 6,
    max_tokens: int = 48,
    rounds: int = 3,
    tasks: str = ",".join(TASKS),
    history: Annotated[
        str, typer.Option(help="request, or server: rounds repeat prompts, so answers are known.")
    ] = "request",
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Measure every drafter ``rounds`` times, interleaved, and print medians."""
    recorder = Recorder("drafters", "every drafter on the same prompts, gamma fixed", threads)
    rig = open_with_corpus(bundle, batch, scratch, HistoryScope(history), threads)
    clock = HostClock(rig)
    for name in ("propose", "tell"):
        clock.watch(name)
    names = drafters.split(",") if drafters else [*DRAFTER_NAMES, *COMPOSED]
    names = ["none", *(name for name in names if name != "none")]
    work = {
        task: prompts
        for task, prompts in tasks_of(rig, num_prompts, max_tokens).items()
        if task in tasks.split(",")
    }
    for task, prompts in work.items():
        measure(rig, clock, task, prompts[:1], "none", 0, WARM_UP_TOKENS, batch)
    cells: dict[tuple[str, str], list[Cell]] = {}
    for _ in range(rounds):
        for task, prompts in work.items():
            for name in names:
                cell = measure(rig, clock, task, prompts, name, gamma, max_tokens, batch)
                cells.setdefault((task, name), []).append(cell)
    medians = [
        sorted(found, key=lambda cell: cell.tokens_per_s)[len(found) // 2]
        for found in cells.values()
    ]
    show(medians, f"{bundle.name}, batch {batch}, gamma {gamma}: medians of {rounds} rounds")
    rows = [
        row_of(
            replace(cell, host_share=statistics.median(one.host_share for one in found)),
            ("task", "drafter"), bundle=bundle.name, batch=batch, gamma=gamma,
        )
        for cell, found in zip(medians, cells.values(), strict=True)
    ]  # fmt: skip
    settings = {
        "num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds, "history": history,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
