"""Outrider beside what a user would pick instead: same weights, prompts, threads, lengths; greedy; batch 1 and 8.

Each peer lives in an environment of its own (``scripts/lab/peers/setup PEER``) and answers jobs there
(``scripts/lab/peers/PEER/run.py``); every run is a fresh process. What a peer cannot do, and a peer that cannot be
set up, is listed with the reason. Prompts are cut to one length, so that nobody pads, and no token ends an answer, so
that all make the same number of tokens. ``same_tokens`` compares with Transformers' plain answers in float32, or
where those are missing with our own.

Every side drafts in every way it has, at every gamma: ours with ``--drafters``, peers with those of ``--peer-drafters``
that they have. With gamma ``auto`` a side chooses itself, where it can; for that ours needs to know what steps cost,
which the first such run measures before its clock starts and keeps in ``WORK/outrider/costs``.

Cells of one batch size and weights run in turns, round by round, every other round backwards; after the first round
only each side's ``--keep`` fastest drafting cells go on. A second table names each side's best plain, best drafting and
best cell, with our speed through each peer's round by round; the fastest peer's ratio is the one that counts. The
result is written after every batch size and weights.

Some of our drafters learn from earlier answers, such as ``suffix``. They start each run knowing nothing, in a fresh
process; what warms it up has other prompts, and then each prompt comes once, so that nothing is answered from memory:
what a later prompt gains from earlier answers, it would gain in a server too.

Of an encoder-decoder pair the prompts are sources, English messages one behind the other, and the end of an answer is
banned until it is as long as wanted, by all sides:

    python -m scripts.lab.bench.peers WORK --target PAIR/target --draft PAIR/draft --prompt-tokens 60 --batches 1,4,16 \
        --num-prompts 16 --peers outrider,ctranslate2,transformers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider.runtime.core.drafting import AUTO_DRAFTERS
from outrider.runtime.offline.prompts import read_prompts
from rich.progress import track
from tokenizers import Tokenizer

from scripts.lab.peers.cells import (
    CHOSEN,
    PEER_DRAFTERS,
    Cell,
    best_rows,
    cells_of,
    contenders,
    reference_of,
    row_of_cell,
)
from scripts.lab.peers.jobs import OURS, PEERS, Job, ask, python_of
from scripts.tools.common import code_prompts, names_of
from scripts.tools.results import ROOT, Recorder, Row
from scripts.tools.sources import sources_of_length
from scripts.tools.tables import show

Asking = Callable[[Cell], dict[str, Any]]


@dataclass(slots=True)
class Rounds:
    """Answers of all cells, round by round.

    Attributes:
        ask: answers a cell.
        answers: by cell and round; a drafter that a side lacks has one cell, of gamma 0.
    """

    ask: Asking
    answers: dict[Cell, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def run(self, cells: Iterable[Cell], number: int) -> None:
        """Ask the cells for one round; those that could not answer in an earlier one are left alone."""
        for cell in cells:
            known = [self.answers.get(one, {}) for one in (cell, cell.at_any_gamma)]
            if any("reason" in answer for found in known for answer in found.values()):
                continue
            answer = self.ask(cell)
            kept = cell.at_any_gamma if answer.get("is_unable") else cell
            self.answers.setdefault(kept, {})[number] = answer

    def run_all(self, cells: Sequence[Cell], rounds: int, keep: int) -> None:
        """Ask the cells of one batch size and weights in all rounds."""
        for number in range(rounds):
            chosen = cells if number == 0 else contenders(cells, self.answers, keep)
            turned = chosen[::-1] if number % 2 else chosen
            self.run(track(turned, description=f"round {number + 1}", transient=True), number)

    def rows(self) -> list[Row]:
        """Every cell's row, in the order in which they were first run."""
        return [
            row_of_cell(cell, found, reference_of(self.answers, cell.batch))
            for cell, found in self.answers.items()
        ]


def reads_source(target: Path) -> bool:
    """Whether a checkpoint's model has an encoder."""
    config = json.loads((target / "config.json").read_text())
    return bool(config.get("is_encoder_decoder"))


def prompts_of(target: Path, count: int, num_tokens: int, texts: Path | None = None) -> list[list[int]]:  # fmt: skip
    """Prompts of ``num_tokens`` tokens each: of a file, else code; messages to translate where there is an encoder.

    Raises:
        typer.BadParameter: there are not that many of that length.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    if reads_source(target):
        try:
            return sources_of_length(tokenizer, count, num_tokens)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    found = code_prompts(8 * count) if texts is None else read_prompts(texts)
    encoded = [tokenizer.encode(text).ids for text in found]
    prompts = [ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens][:count]
    if len(prompts) < count:
        raise typer.BadParameter(f"only {len(prompts)} prompts of {num_tokens} tokens")
    return prompts


def gammas_of(text: str) -> list[int | None]:
    """Return the gammas of a comma-separated list, each once; None for ``auto``."""
    return [None if name == CHOSEN else int(name) for name in names_of(text)]


def asking(pythons: Mapping[str, tuple[str | None, str]], work: Path, settings: dict[str, Any]) -> Asking:  # fmt: skip
    """Answers a cell in a process of its side; ``settings`` are the fields of ``Job`` that all share."""

    def answer(cell: Cell) -> dict[str, Any]:
        python, reason = pythons[cell.who]
        if python is None:
            return {"reason": reason}
        job = Job(
            work=str(work.resolve() / cell.who), weights=cell.weights, drafter=cell.drafter, gamma=cell.gamma,
            batch=cell.batch, **settings,
        )  # fmt: skip
        return ask(cell.who, python, job)

    return answer


def main(
    work: Annotated[Path, typer.Argument(help="folder for what peers make of the checkpoints")],
    target: Annotated[Path, typer.Option(help="checkpoint")] = ROOT / "demo" / "target",
    draft: Annotated[Path, typer.Option(help="checkpoint")] = ROOT / "demo" / "draft",
    prompts: Annotated[Path | None, typer.Option(help="as of outrider analyze; without: code")] = None,
    peers: Annotated[str, typer.Option(help="comma-separated")] = ",".join(PEERS),
    weights: Annotated[str, typer.Option(help="float32, int8, int4")] = "float32,int8",
    drafters: Annotated[str, typer.Option(help="ours")] = ",".join(AUTO_DRAFTERS),
    peer_drafters: Annotated[str, typer.Option(help="peers', as far as each has them")] = ",".join(PEER_DRAFTERS),
    ngram: Annotated[int, typer.Option(min=2, help="longest n-gram of peers' prompt lookup")] = 3,
    gammas: Annotated[str, typer.Option(help="draft tokens, or auto; plain is always run")] = "2,4,auto",
    batches: str = "1,8",
    num_prompts: int = 8,
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    keep: Annotated[int, typer.Option(min=1, help="drafting cells per side after round 1")] = 3,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:  # fmt: skip
    """Run every side in every way, in turns; print median speeds or reasons, and each side's best beside ours."""
    recorder = Recorder("peers", "side by side with other engines, greedy", threads)
    ours, theirs = names_of(drafters), names_of(peer_drafters, PEER_DRAFTERS)
    ways = {who: ours if who == OURS else theirs for who in names_of(peers, PEERS)}
    sizes = [int(size) for size in names_of(batches)]
    if num_prompts < max(sizes):
        raise typer.BadParameter(f"num-prompts must be at least {max(sizes)}")
    groups = [
        cells_of(ways, kind, batch, gammas_of(gammas))
        for kind in names_of(weights, ("float32", "int8", "int4"))
        for batch in sizes
    ]
    settings = {
        "target": str(target.resolve()), "draft": str(draft.resolve()), "threads": threads, "ngram": ngram,
        "prompts": prompts_of(target, num_prompts, prompt_tokens, prompts), "max_tokens": max_tokens,
        "reads_source": reads_source(target),
    }  # fmt: skip
    pythons = {who: python_of(who) for who in track(ways, description="setting up")}
    found = Rounds(asking(pythons, work, settings))
    recorded = {
        "target": target.name, "num_prompts": num_prompts, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens,
        "rounds": rounds, "keep": keep, "ngram": ngram,
    }  # fmt: skip
    rows: list[Row] = []
    best: list[Row] = []
    for cells in groups:
        found.run_all(cells, rounds, keep)
        rows, best = found.rows(), [*best, *best_rows(cells, found.answers)]
        recorder.write(json_out, [*rows, *best], recorded)
    show(rows, "cells")
    show(best, "each side's best setting")


if __name__ == "__main__":
    typer.run(main)
