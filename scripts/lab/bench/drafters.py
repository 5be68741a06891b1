"""Every drafter in one run: what each brings, and what drafting costs.

1. Every drafter on code, on editing and on noise, gamma fixed, so that no controller hides what a drafter costs where
   it does not pay.
2. Host work of drafting in a batch of eight.

What is compared takes turns prompt by prompt, so that a disturbance hits all of it; "speed" is the median of the ratios
of single prompts. Ouroboros' mechanisms are compared in ``papers.ouroboros``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.drafters.registry import DRAFTER_NAMES
from outrider.runtime.drafters.text.suffix_array import write_datastore

from scripts.lab.bench.tools.drafter_runs import (
    NUM_CODE,
    PLAIN,
    Bench,
    Line,
    Prompt,
    Setting,
    Tally,
    code_task,
    compare,
    edit_task,
    noise_task,
    speed_over,
    total,
)
from scripts.tools.common import code_prompts, open_rig
from scripts.tools.results import Recorder, Row
from scripts.tools.tables import show

COMPOSED = ("model/lookup", "model/phrases", "lookup+model", "suffix+model")
HOST_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One invocation: what all tables share, and the rows they leave."""

    num_prompts: int
    max_tokens: int
    rounds: int
    gamma: int
    threads: int
    scratch: Path
    rows: list[Row] = field(default_factory=list)

    def open(self, bundle: Path, batch: int = 1, **drafting: object) -> Bench:
        """A bench whose datastore holds prompts that are never measured."""
        store = self.scratch / "datastore"
        if not store.exists():
            rig = open_rig(bundle, max_batch=1, num_threads=self.threads)
            measured = set(code_prompts(NUM_CODE))
            texts = [text for text in code_prompts(4 * NUM_CODE) if text not in measured]
            vocab_size = rig.target.limits.vocab_size
            write_datastore([rig.tokenizer.encode(t) for t in texts], store, vocab_size=vocab_size)
            rig.close()
        config = DraftingConfig(datastore=str(store), **drafting)  # type: ignore[arg-type]
        return Bench(open_rig(bundle, max_batch=batch, num_threads=self.threads, drafting=config))

    def line(self, bench: Bench, setting: Setting, task: str = "code", **more: Any) -> Line:
        """A line of a table."""
        return Line(bench, setting, task, self.max_tokens, **more)

    def report(
        self, title: str, task: str, bundle: Path, found: dict[str, list[Tally]], base: str
    ) -> None:
        """Print a table with ratios to its line ``base``, and keep its rows."""
        base_yield = total(found[base]).tokens_per_step
        rows = []
        for name, tallies in found.items():
            figures = total(tallies).figures()
            figures["speed_ratio"] = speed_over(tallies, found[base])
            figures["tokens_per_step_ratio"] = total(tallies).tokens_per_step / base_yield
            case = {"task": task, "drafter": name, "bundle": bundle.name}
            rows.append(Row(case=case, figures=figures))
        show(rows, f"{bundle.name}: {title}")
        self.rows.extend(rows)


def every_table(run: Run, bundle: Path, names: Sequence[str], tasks: Sequence[str]) -> None:
    """Every drafter at one gamma on every task, none with a history of other requests."""
    with run.open(bundle, history_scope=HistoryScope.REQUEST) as bench:
        code = code_task(bench.rig, run.num_prompts)
        work = {
            "code": lambda: code,
            "edit": lambda: edit_task(bench.rig, code, run.max_tokens),
            "noise": lambda: noise_task(bench.rig, run.num_prompts),
        }
        for task in tasks:
            beside_plain(run, bundle, bench, names, work[task](), task)


def host_table(run: Run, bundle: Path, names: Sequence[str]) -> None:
    """Report the host's time of drafting in a batch of eight."""
    with run.open(bundle, batch=HOST_BATCH, history_scope=HistoryScope.REQUEST) as bench:
        prompts = code_task(bench.rig, max(run.num_prompts, HOST_BATCH))
        prompts = prompts[: len(prompts) // HOST_BATCH * HOST_BATCH]
        beside_plain(run, bundle, bench, names, prompts, "code", batch=HOST_BATCH)


def beside_plain(
    run: Run, bundle: Path, bench: Bench, names: Sequence[str], prompts: Sequence[Prompt], task: str, batch: int = 1
) -> None:  # fmt: skip
    """Report drafters by name at one gamma beside plain decoding."""
    bench.run(PLAIN, task, prompts[:batch], run.max_tokens)
    settings = [PLAIN, *(Setting(drafter=name, gamma=run.gamma) for name in names)]
    lines = {one.drafter: run.line(bench, one, task) for one in settings}
    found = compare(lines, prompts, rounds=run.rounds, batch=batch)
    what = task if batch == 1 else f"batch {batch}"
    run.report(f"{what}, gamma {run.gamma}", what, bundle, found, "none")


def main(
    bundle: Path,
    scratch: Annotated[Path, typer.Option(help="Folder for the datastore.")],
    drafters: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    figures: Annotated[str, typer.Option(help="Of 1 every drafter, 2 host.")] = "1,2",
    tasks: str = "code,edit,noise",
    gamma: int = 4,
    num_prompts: int = 12,
    max_tokens: int = 64,
    rounds: int = 3,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:  # fmt: skip
    """Measure, print tables of medians, and write them as one result."""
    recorder = Recorder("drafters", "every drafter", threads)
    sizes = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    run = Run(**sizes, gamma=gamma, threads=threads, scratch=scratch)
    names = drafters.split(",") if drafters else [*DRAFTER_NAMES, *COMPOSED]
    names = [name for name in names if name != "none"]
    wanted = figures.split(",")
    if "1" in wanted:
        every_table(run, bundle, names, tasks.split(","))
    if "2" in wanted:
        host_table(run, bundle, names)
    recorder.write(json_out, run.rows, {**sizes, "gamma": gamma})


if __name__ == "__main__":
    typer.run(main)
