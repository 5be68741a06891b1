"""Every drafter in one run: what each brings, what Ouroboros' mechanisms bring, and what drafting costs.

1. Ouroboros against plain model drafting, both tuned on other prompts, histories shared, on this bundle and on one
   whose draft is dear (``--dear``; ``python -m scripts.lab.widen.widen demo-dear-draft OUT`` and ``outrider export``
   make one).
2. Ouroboros' mechanisms, each added in turn, and reuse with and without locality.
3. Every drafter on code, on editing and on noise, gamma fixed, so that no controller hides what a drafter costs where
   it does not pay.
4. Host work of drafting in a batch of eight.

What is compared takes turns prompt by prompt, so that a disturbance hits all of it; "speed" is the median of the ratios
of single prompts. In the tables of 2 the host's share is not taken.
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
    CodePrompts,
    Line,
    Prompt,
    Setting,
    Tally,
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
FAMILIES = {
    "model": [Setting(drafter="model", gamma=gamma) for gamma in (1, 2, 3, 4, 6)],
    **{
        name: [
            Setting(drafter=name, gamma=gamma, params=(("phrase_length", length),))
            for gamma in (4, 6, 8)
            for length in (2, 4)
        ]
        for name in ("ouroboros", "phrases+ouroboros")
    },
}
HOST_BATCH = 8

# Table 4 of the paper: what is added in turn, as settings of the server and of the request; the last is our addition.
PAPER = {
    "draft_passes": 8, "draft_lenience": 1.0, "harvests_rejected": False, "history_scope": HistoryScope.REQUEST,
}  # fmt: skip
MECHANISMS: tuple[tuple[str, dict[str, object], int], ...] = (
    ("phrases accelerate the draft", {}, 0),
    ("+ lengthening, after 4 passes", {"draft_passes": 4}, 3),
    ("+ phrases from verification", {"harvests_rejected": True}, 3),
    ("+ reuse across requests", {"history_scope": HistoryScope.TENANT}, 3),
    ("+ lenient drafting", {"draft_lenience": DraftingConfig().draft_lenience}, 3),
    ("+ window of 4 on the draft", {"draft_window": 4}, 3),
    ("no window, after 1 pass", {"draft_window": 0, "draft_passes": 1}, 3),
)


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


def tuned_table(run: Run, bundle: Path) -> None:
    """Ouroboros against model drafting, each as it is fastest on the tuning prompts; histories shared."""
    with run.open(bundle) as bench:
        prompts = CodePrompts.of(bench.rig, run.num_prompts)
        bench.run(PLAIN, "code", prompts.tuning[:1], run.max_tokens)
        chosen = {
            family: fastest(run, bench, settings, prompts.tuning)
            for family, settings in FAMILIES.items()
        }
        lines = {one.name: run.line(bench, one) for one in (PLAIN, *chosen.values())}
        # What has been served before: as much again as is measured.
        warm = prompts.others[: run.num_prompts]
        found = compare(lines, prompts.measured, rounds=run.rounds, warm=warm)
    run.report("each tuned, histories shared", "tuned", bundle, found, chosen["model"].name)


def fastest(
    run: Run, bench: Bench, settings: Sequence[Setting], prompts: Sequence[Prompt]
) -> Setting:
    """The setting of most tokens per second."""
    tried = compare(
        {one.name: run.line(bench, one) for one in settings}, prompts, rounds=run.rounds
    )
    return max(settings, key=lambda one: total(tried[one.name]).tokens_per_s)


def mechanisms_table(run: Run, bundle: Path) -> None:
    """Each mechanism of Ouroboros added in turn, at one gamma."""
    gamma = run.gamma * 2
    lines: dict[str, Line] = {}
    settings = dict(PAPER)
    for name, added, num_phrases in MECHANISMS:
        settings |= added
        bench = run.open(bundle, **settings)
        if not lines:
            lines["model"] = run.line(bench, Setting(drafter="model", gamma=gamma))
        one = Setting(drafter="ouroboros", gamma=gamma, params=(("num_phrases", num_phrases),))
        lines[name] = run.line(bench, one)
    prompts = CodePrompts.of(lines["model"].bench.rig, run.num_prompts).measured
    found = compare(lines, prompts, rounds=run.rounds)
    close(lines)
    run.report(f"mechanisms added in turn, gamma {gamma}", "mechanisms", bundle, found, "model")


def locality_table(run: Run, bundle: Path) -> None:
    """Reuse off and on, with prompts shuffled and with those of one source file together."""
    one = Setting(drafter="ouroboros", gamma=run.gamma)
    lines: dict[str, Line] = {}
    for word, scope in (("off", HistoryScope.REQUEST), ("on", HistoryScope.TENANT)):
        bench = run.open(bundle, history_scope=scope)
        prompts = CodePrompts.of(bench.rig, run.num_prompts).measured
        lines[f"reuse {word}, shuffled"] = run.line(bench, one)
        lines[f"reuse {word}, by file"] = run.line(bench, one, order=by_file(bench, prompts))
    found = compare(lines, prompts, rounds=run.rounds)
    close(lines)
    run.report("reuse and locality", "locality", bundle, found, "reuse off, shuffled")


def by_file(bench: Bench, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, those of one source file together."""
    places = {text: place for place, text in enumerate(code_prompts(NUM_CODE))}
    decode = bench.rig.tokenizer.decode
    return sorted(prompts, key=lambda prompt: places.get(decode(prompt[0]), 0))


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
            beside_plain(run, bundle, bench, names, work[task](), task)


def host_table(run: Run, bundle: Path, names: Sequence[str]) -> None:
    """Report the host's time of drafting in a batch of eight."""
    with run.open(bundle, batch=HOST_BATCH, history_scope=HistoryScope.REQUEST) as bench:
        prompts = CodePrompts.of(bench.rig, max(run.num_prompts, HOST_BATCH)).measured
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


def close(lines: dict[str, Line]) -> None:
    """Close the benches of a table that has several."""
    for bench in {id(line.bench): line.bench for line in lines.values()}.values():
        bench.rig.close()


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
    json_out: Path | None = None,
) -> None:  # fmt: skip
    """Measure, print tables of medians, and write them as one result."""
    recorder = Recorder("drafters", "every drafter, and the mechanisms of Ouroboros", threads)
    sizes = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
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
