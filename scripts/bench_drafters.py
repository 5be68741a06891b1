"""Every drafter in one run: what each brings, what Ouroboros' mechanisms bring, and what drafting costs.

1. Ouroboros against plain model drafting, both tuned on other prompts, histories shared, on this bundle and on one
   whose draft is dear (``--dear``; ``python -m scripts.widen_pair demo-dear-draft OUT`` and ``outrider export`` make
   one).
2. Ouroboros' mechanisms, each added in turn, and reuse with and without locality.
3. Every drafter on code, on editing and on noise, gamma fixed, so that no controller hides what a drafter costs where
   it does not pay.
4. Host work of drafting in a batch of eight.

Runs of what is compared are interleaved and medians reported, so that a disturbance hits all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from runtime.core.drafting import DraftingConfig, HistoryScope
from runtime.drafters import DRAFTER_NAMES
from runtime.drafters.suffix_array import write_datastore
from scripts.bench_common import code_prompts, open_rig
from scripts.bench_results import Recorder, Row
from scripts.drafter_runs import (
    NUM_CODE,
    PLAIN,
    Bench,
    Cell,
    CodePrompts,
    Prompt,
    Setting,
    edit_task,
    median,
    noise_task,
)

COMPOSED = ("model/lookup", "model/phrases", "lookup+model", "suffix+model")
MODEL_GAMMAS = (1, 2, 3, 4, 6)
OUROBOROS = tuple(
    Setting(drafter=name, gamma=gamma, params=(("phrase_length", length),))
    for name in ("ouroboros", "phrases+ouroboros")
    for gamma in (4, 6, 8)
    for length in (2, 4)
)
HOST_BATCH = 8
QUICK = {"num_prompts": 4, "max_tokens": 40, "rounds": 1}

# Table 4 of the paper: what is added in turn, as settings of the server and of the request; the last is our addition.
PAPER = {
    "draft_passes": 8, "draft_lenience": 1.0, "harvests_rejected": False, "history_scope": HistoryScope.REQUEST,
}  # fmt: skip
MECHANISMS: tuple[tuple[str, dict[str, object], int], ...] = (
    ("phrases accelerate the draft", {}, 0),
    ("+ lengthening", {}, 3),
    ("+ phrases from verification", {"harvests_rejected": True}, 3),
    ("+ reuse across requests", {"history_scope": HistoryScope.SERVER}, 3),
    ("+ lenient drafting", {"draft_lenience": DraftingConfig().draft_lenience}, 3),
    ("+ window of 4 on the draft", {"draft_window": 4}, 3),
    ("no window, few passes", {"draft_window": 0, "draft_passes": 1}, 3),
)


class Run:
    """One invocation: what all tables share, and the rows they leave."""

    def __init__(
        self,
        *,
        num_prompts: int,
        max_tokens: int,
        rounds: int,
        gamma: int,
        threads: int,
        scratch: Path,
    ) -> None:
        self.num_prompts = num_prompts
        self.max_tokens = max_tokens
        self.rounds = rounds
        self.gamma = gamma
        self.threads = threads
        self.scratch = scratch
        self.rows: list[Row] = []

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

    def interleaved(self, runs: dict[str, Callable[[], Cell]]) -> dict[str, Cell]:
        """Medians of named runs, each run once per round, with the median of host shares beside."""
        found: dict[str, list[Cell]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                found[name].append(run())
        return {
            name: replace(median(cells), host_share=median_of(cell.host_share for cell in cells))
            for name, cells in found.items()
        }

    def report(
        self, title: str, task: str, bundle: Path, cells: dict[str, Cell], base: str
    ) -> None:
        """Print a table with speed-ups over its line ``base``, and keep its rows."""
        table = Table(title=f"{bundle.name}: {title}")
        table.add_column("setting")
        for head in (
            "tokens/s",
            "ratio",
            "tokens/pass",
            "ratio",
            "kept",
            "draft passes",
            "host share",
        ):
            table.add_column(head, justify="right")
        for name, cell in cells.items():
            speed, yielded = (
                getattr(cell, one) / getattr(cells[base], one)
                for one in ("tokens_per_s", "tokens_per_step")
            )
            table.add_row(
                name, f"{cell.tokens_per_s:.0f}", f"{speed:.2f}", f"{cell.tokens_per_step:.2f}", f"{yielded:.2f}",
                "-" if cell.utilization is None else f"{cell.utilization:.2f}", f"{cell.draft_passes:.2f}",
                "-" if cell.host_share is None else f"{cell.host_share:.3f}",
            )  # fmt: skip
            figures = {**asdict(cell), "speed_ratio": speed, "tokens_per_step_ratio": yielded}
            case = {"task": task, "drafter": name, "bundle": bundle.name}
            self.rows.append(Row(case=case, figures=figures))
        Console(width=120).print(table)


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what there is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def fresh(
    bench: Bench,
    setting: Setting,
    prompts: Sequence[Prompt],
    max_tokens: int,
    warm: Iterable[Prompt] = (),
) -> Cell:
    """A run by drafters that know no history but that of ``warm``, which is not measured."""
    bench.forget()
    if setting is not PLAIN:
        for prompt in warm:
            bench.run(setting, "code", [prompt], max_tokens)
    return bench.run(setting, "code", prompts, max_tokens)


def tuned_table(run: Run, bundle: Path) -> None:
    """Ouroboros against model drafting, each as it is fastest on the tuning prompts; histories shared."""
    with run.open(bundle) as bench:
        prompts = CodePrompts.of(bench.rig, run.num_prompts)
        families = {
            "model": [Setting(drafter="model", gamma=gamma) for gamma in MODEL_GAMMAS],
            "ouroboros": list(OUROBOROS),
        }
        bench.run(PLAIN, "code", prompts.tuning[:1], run.max_tokens)
        chosen = [PLAIN]
        for settings in families.values():
            tried = {
                one.name: (lambda one=one: fresh(bench, one, prompts.tuning, run.max_tokens))
                for one in settings
            }
            cells = run.interleaved(tried)
            chosen.append(max(settings, key=lambda one: cells[one.name].tokens_per_s))
        # What has been served before: as much again as is measured.
        warm = prompts.others[: run.num_prompts]
        cells = run.interleaved(
            {
                one.name: (
                    lambda one=one: fresh(bench, one, prompts.measured, run.max_tokens, warm)
                )
                for one in chosen
            }
        )
    run.report("both tuned, histories shared", "tuned", bundle, cells, chosen[1].name)


def mechanisms_table(run: Run, bundle: Path) -> None:
    """Each mechanism of Ouroboros added in turn, at one gamma."""
    gamma = run.gamma * 2
    model = Setting(drafter="model", gamma=gamma)
    benches, runs = [], {}
    settings = dict(PAPER)
    for name, added, num_phrases in MECHANISMS:
        settings |= added
        bench = run.open(bundle, **settings)
        benches.append(bench)
        prompts = CodePrompts.of(bench.rig, run.num_prompts)
        one = Setting(drafter="ouroboros", gamma=gamma, params=(("num_phrases", num_phrases),))
        if not runs:
            runs["model"] = lambda b=bench, p=prompts: fresh(b, model, p.measured, run.max_tokens)
        runs[name] = lambda b=bench, o=one, p=prompts: fresh(b, o, p.measured, run.max_tokens)
    cells = run.interleaved(runs)
    for bench in benches:
        bench.rig.close()
    run.report(f"mechanisms added in turn, gamma {gamma}", "mechanisms", bundle, cells, "model")


def locality_table(run: Run, bundle: Path) -> None:
    """Reuse off and on, with prompts shuffled and with those of one source file together."""
    one = Setting(drafter="ouroboros", gamma=run.gamma)
    benches = {
        scope: run.open(bundle, history_scope=scope)
        for scope in (HistoryScope.REQUEST, HistoryScope.SERVER)
    }
    runs: dict[str, Callable[[], Cell]] = {}
    for scope, bench in benches.items():
        prompts = CodePrompts.of(bench.rig, run.num_prompts).measured
        places = {text: place for place, text in enumerate(code_prompts(NUM_CODE))}
        decode = bench.rig.tokenizer.decode
        local = sorted(prompts, key=lambda prompt: places.get(decode(prompt[0]), 0))
        for order, these in (("shuffled", prompts), ("by file", local)):
            name = f"reuse {'on' if scope is HistoryScope.SERVER else 'off'}, {order}"
            runs[name] = lambda b=bench, p=these: fresh(b, one, p, run.max_tokens)
    cells = run.interleaved(runs)
    for bench in benches.values():
        bench.rig.close()
    run.report("reuse and locality", "locality", bundle, cells, "reuse off, shuffled")


def every_table(run: Run, bundle: Path, names: Sequence[str], tasks: Sequence[str]) -> None:
    """Every drafter at one gamma on every task, none with a history of other requests."""
    with run.open(bundle, history_scope=HistoryScope.REQUEST) as bench:
        code = CodePrompts.of(bench.rig, run.num_prompts).measured
        work = {
            "code": lambda: code,
            "edit": lambda: edit_task(bench.rig, code, run.max_tokens),
            "noise": lambda: noise_task(bench.rig, run.num_prompts),
        }
        for task in tasks:
            prompts = work[task]()
            cells = compared(run, bench, names, task, prompts, 1)
            run.report(f"{task}, gamma {run.gamma}", task, bundle, cells, "none")


def compared(
    run: Run, bench: Bench, names: Sequence[str], task: str, prompts: Sequence[Prompt], batch: int
) -> dict[str, Cell]:
    """Plain decoding and drafters by name at one gamma, over the same prompts."""
    settings = [PLAIN, *(Setting(drafter=name, gamma=run.gamma) for name in names)]
    bench.run(PLAIN, task, prompts[:batch], run.max_tokens, batch)
    return run.interleaved(
        {
            one.drafter: (lambda one=one: bench.run(one, task, prompts, run.max_tokens, batch))
            for one in settings
        }
    )


def host_table(run: Run, bundle: Path, names: Sequence[str]) -> None:
    """What drafting costs the host in a batch of eight."""
    with run.open(bundle, batch=HOST_BATCH, history_scope=HistoryScope.REQUEST) as bench:
        prompts = CodePrompts.of(bench.rig, max(run.num_prompts, HOST_BATCH)).measured
        prompts = prompts[: len(prompts) // HOST_BATCH * HOST_BATCH]
        cells = compared(run, bench, names, "code", prompts, HOST_BATCH)
    run.report(
        f"batch {HOST_BATCH}, gamma {run.gamma}", f"batch {HOST_BATCH}", bundle, cells, "none"
    )


def main(
    bundle: Path,
    scratch: Annotated[Path, typer.Option(help="Folder for the datastore.")],
    dear: Annotated[Path | None, typer.Option(help="Bundle whose draft costs 0.3 to 0.5 of a target step.")] = None,
    drafters: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    figures: Annotated[str, typer.Option(help="Of 1 tuned, 2 mechanisms, 3 every drafter, 4 host.")] = "1,2,3,4",
    tasks: str = "code,edit,noise",
    gamma: int = 4,
    num_prompts: int = 12,
    max_tokens: int = 64,
    rounds: int = 3,
    threads: int = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, short answers, one round.")] = False,
    json_out: Path | None = None,
) -> None:  # fmt: skip
    """Measure, print tables of medians, and write them as one result."""
    recorder = Recorder("drafters", "every drafter, and the mechanisms of Ouroboros", threads)
    sizes = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    sizes = QUICK if quick else sizes
    run = Run(**sizes, gamma=gamma, threads=threads, scratch=scratch)
    names = drafters.split(",") if drafters else [*DRAFTER_NAMES, *COMPOSED]
    names = [name for name in names if name != "none"]
    wanted = figures.split(",")
    if "1" in wanted:
        for one in (bundle, *([dear] if dear else [])):
            tuned_table(run, one)
    if "2" in wanted:
        mechanisms_table(run, dear or bundle)
        locality_table(run, dear or bundle)
    if "3" in wanted:
        every_table(run, bundle, names, tasks.split(","))
    if "4" in wanted:
        host_table(run, bundle, names)
    recorder.write(json_out, run.rows, {**sizes, "gamma": gamma})


if __name__ == "__main__":
    typer.run(main)
