"""Tables of Leviathan et al. 2023 for an encoder-decoder pair: Tables 2 and 3, 5 (lenience), and beams as in A.4.

Tables 2 and 3: alpha of each drafter over what the target wrote, the gamma and the speed-up that the formula promises
at that alpha, and the speed-up measured there. ``exp_paper`` is Theorem 3.8, in which a verification costs one plain
step; ``exp`` is its generalisation to measured costs (``runtime/oracle/analysis.py``), which also chooses gamma among
those measured. c and v are of whole steps, sampling included. Drafters: the bundle's draft model (an encoder of its
own), the draft of ``--shared`` (the target's encoder), unigram and bigram counts of the text, prompt lookup in source
and answer.

Table 5: alpha where the target keeps a token at up to 1 / l times its probability. A.4: steps that one pass of the
target takes in beam search, and its speed against plain search.

Sources are the standard library's: messages to translate, functions to summarise. Answers end where the target ends
them; those of beam search all take the same number of steps.

    python -m scripts.bench.paper BUNDLE --shared BUNDLE_OF_SHARED_DRAFT
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import BeamParams
from outrider.runtime.offline.analysis import analyze
from outrider.runtime.offline.options import AnalysisOptions
from outrider.runtime.offline.prompts import prompt_of
from outrider.runtime.offline.results import Analysis, SpeedRow
from outrider.runtime.offline.rig import RigOptions
from outrider.runtime.oracle.analysis import walltime_factor
from rich.console import Console

from scripts.bench.beams import measure, row_of
from scripts.bench.tools.common import names_of, open_rig
from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.sources import TASKS, task_sources
from scripts.bench.tools.tables import show

OWN, SHARED = "own encoder", "shared encoder"
MODEL = "model"
_OTHERS = ("unigram", "bigram", "lookup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A drafter of a bundle as the tables name it."""

    analysis: Analysis
    drafter: str
    name: str


def entries_of(own: Analysis, shared: Analysis | None) -> list[Entry]:
    """The drafters of the tables, in their order; the second bundle's draft model behind the first one's."""
    names = dict.fromkeys(row.drafter for row in own.alphas)
    entries = [Entry(analysis=own, drafter=n, name=OWN if n == MODEL else n) for n in names]
    if shared is not None:
        entries.insert(1, Entry(analysis=shared, drafter=MODEL, name=SHARED))
    return entries


def speed_rows(task: str, entry: Entry) -> list[Row]:
    """Tables 2 and 3 of one drafter, a row a temperature, at the gamma that the formula finds best."""
    alphas = {row.temperature: row for row in entry.analysis.alphas if row.drafter == entry.drafter}
    rows = []
    for temperature, known in alphas.items():
        measured = [
            row
            for row in entry.analysis.speeds
            if row.drafter == entry.drafter and row.temperature == temperature
        ]
        best = max(measured, key=_promised)
        paper = walltime_factor(known.alpha, best.gamma, best.draft_cost)
        rows.append(
            Row(
                case={"task": task, "drafter": entry.name, "temperature": temperature},
                figures={
                    "alpha": known.alpha, "coverage": known.coverage, "gamma": best.gamma, "c": best.draft_cost,
                    "v": best.verify_cost, "exp_paper": paper, "exp": best.predicted, "measured": best.speedup,
                    "best_measured": max(row.speedup for row in measured), "alpha_hat": best.alpha_hat,
                    "tokens_per_step": best.tokens_per_step,
                },
            )
        )  # fmt: skip
    return rows


def _promised(row: SpeedRow) -> float:
    return row.predicted or 0.0


def lenience_rows(task: str, entry: Entry) -> list[Row]:
    """Table 5 of one drafter, a row a temperature and a column a lenience."""
    return [
        Row(
            case={"task": task, "drafter": entry.name, "temperature": row.temperature},
            figures={f"alpha_at_{lenience:g}": alpha for lenience, alpha in row.lenient.items()},
        )
        for row in entry.analysis.alphas
        if row.drafter == entry.drafter
    ]


def analyzed(bundle: Path, texts: Sequence[str], options: AnalysisOptions) -> Analysis:
    """What ``outrider analyze`` finds for the sources."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "sources.jsonl"
        prompts.write_text("".join(json.dumps(text) + "\n" for text in texts))
        return analyze(bundle, prompts, options, lambda phase, done, total: None)


def beam_rows(
    bundle: Path,
    task: str,
    texts: Sequence[str],
    widths: Sequence[int],
    gammas: Sequence[int],
    options: AnalysisOptions,
) -> list[Row]:
    """Beam search with the draft model against plain beam search; every search takes all its steps."""
    threads = options.rig.num_threads
    with closing(open_rig(bundle, max_batch=max(widths), num_threads=threads)) as rig:
        sources = [prompt_of(text, rig.tokenizer) for text in texts]
        rows = []
        for width in widths:
            beams = BeamParams(num_beams=width, num_results=width, width=width)
            tallies = measure(
                rig,
                sources,
                beams,
                [0, *gammas],
                rounds=options.rounds,
                max_tokens=options.max_tokens,
            )
            rows += [row_of(beams, gamma, tallies[gamma], tallies[0]) for gamma in gammas]
    return [replace(row, case={"task": task, **row.case}) for row in rows]


def main(
    bundle: Annotated[Path, typer.Argument(help="Of a pair whose draft has an encoder of its own.")],
    shared: Annotated[Path | None, typer.Option(help="The same target with a draft that shares its encoder.")] = None,
    tasks: Annotated[str, typer.Option(help="What sources ask for.")] = ",".join(TASKS),
    gammas: Annotated[str, typer.Option(help="Draft tokens per step.")] = "1,2,3,4,5,7",
    leniences: Annotated[str, typer.Option(help="Of Table 5.")] = "1,0.5,0.3,0.1",
    beams: Annotated[str, typer.Option(help="Widths of beam search; empty for none.")] = "1,4",
    num_sources: Annotated[int, typer.Option(min=1, help="Per task.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: int = 2,
    counts_processor: Annotated[bool, typer.Option("--processor", help="Count processor seconds.")] = False,
    json_out: Path | None = None,
) -> None:  # fmt: skip
    """Measure every drafter on every task, and print the tables."""
    recorder = Recorder("paper", "the paper's tables for an encoder-decoder pair", threads)
    numbers = tuple(int(one) for one in names_of(gammas))
    options = AnalysisOptions(
        drafters=(MODEL, *_OTHERS), gammas=numbers, max_tokens=max_tokens, rounds=rounds,
        leniences=tuple(float(one) for one in names_of(leniences)),
        # One token in common is enough for lookup: names and options are copied from a source one by one.
        rig=RigOptions(
            num_threads=threads, counts_processor=counts_processor, drafting=DraftingConfig(lookup_min_ngram=1)
        ),
    )  # fmt: skip
    speeds: list[Row] = []
    lenient: list[Row] = []
    searches: list[Row] = []
    for task in names_of(tasks, tuple(TASKS)):
        texts = task_sources(task, num_sources)
        own = analyzed(bundle, texts, options)
        draft = replace(options, drafters=(MODEL,))
        entries = entries_of(own, analyzed(shared, texts, draft) if shared is not None else None)
        speeds += [row for entry in entries for row in speed_rows(task, entry)]
        lenient += [row for entry in entries for row in lenience_rows(task, entry)]
        if widths := [int(one) for one in names_of(beams)]:
            searches += beam_rows(
                bundle, task, texts[: max(1, num_sources // 8)], widths, numbers[:3], options
            )
        Console().print(f"{task}: done")
    show(speeds, "Tables 2 and 3")
    show(lenient, "Table 5: alpha by lenience")
    show(searches, "A.4: beam search")
    settings = {"num_sources": num_sources, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(json_out, [*speeds, *lenient, *searches], settings)


if __name__ == "__main__":
    typer.run(main)
