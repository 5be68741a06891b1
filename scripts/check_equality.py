"""Speculation on equals speculation off, token for token, on a real bundle: the second promise, checked at length."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import typer
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Failed
from outrider.runtime.core.params import Prompt, SpeculationParams
from outrider.runtime.drafters.registry import DRAFTER_NAMES
from outrider.runtime.drafters.text.suffix_array import write_datastore
from outrider.runtime.offline.prompts import prompt_of
from outrider.runtime.offline.rig import Answer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.tools.common import Rig, code_prompts, open_rig
from scripts.tools.sources import task_sources

COMPOSED = ("model/lookup", "model/suffix+lookup", "lookup+datastore+model", "tree+suffix")
ALL = "all"
MATRIX = (6, 14, "0,1,2,3,4,5,6,7,8", "1,2,3,4,5", ALL)
"""Prompts, tokens, gammas, batches and drafters of the whole matrix; more prompts than slots, so that some wait."""
MODES = {"greedy": (0.0, ExactnessMode.MAX_ACCEPT), "seed_stable": (1.0, ExactnessMode.SEED_STABLE)}

Answers = list[tuple[int, ...]]
Prompts = Sequence[Prompt | tuple[int, ...]]


def completions(
    rig: Rig, prompts: Prompts, speculations: Sequence[SpeculationParams], params: SamplingParams,
    max_tokens: int, arrivals: random.Random,
) -> Answers:  # fmt: skip
    """Output tokens of every prompt, submitted at random steps while others run."""
    answers = [Answer() for _ in prompts]
    pending, running = list(range(len(prompts))), list[Answer]()
    while pending or running:
        while pending and (not running or arrivals.random() < 0.3):
            number = pending.pop(0)
            spec = rig.spec(prompts[number], params, speculations[number], max_tokens, seed=number)
            running.append(answers[number])
            rig.worker.submit(spec, answers[number])
        rig.worker.run_step()
        running = [one for one in running if one.end is None]
    if errors := [one.end.error for one in answers if isinstance(one.end, Failed)]:
        raise RuntimeError("a request failed") from errors[0]
    return [tuple(one.tokens) for one in answers]


def quoted(speculation: SpeculationParams, answers: Answers) -> list[SpeculationParams]:
    """Per prompt, with a reference that its answer quotes in part: the middle is missing."""
    return [
        replace(speculation, reference_tokens=(*one[: len(one) // 2], *one[-len(one) // 3 :]))
        for one in answers
    ]


def plain_answers(rig: Rig, prompts: Prompts, max_tokens: int) -> dict[str, Answers]:
    """Answers without drafts, by mode."""
    found = {}
    for name, (temperature, mode) in MODES.items():
        off = [SpeculationParams(is_enabled=False, mode=mode)] * len(prompts)
        params = SamplingParams(temperature=temperature)
        found[name] = completions(rig, prompts, off, params, max_tokens, random.Random(0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Drafters, gammas and batch sizes to compare, each with each other."""

    drafters: Sequence[str]
    gammas: Sequence[int]
    batches: Sequence[int]

    @classmethod
    def of(cls, drafters: str, gammas: str, batches: str) -> Self:
        """From lists with commas."""
        known = [name for name in DRAFTER_NAMES if name != "none"]
        return cls(
            drafters=[*known, *COMPOSED] if drafters == ALL else drafters.split(","),
            gammas=[int(gamma) for gamma in gammas.split(",")],
            batches=[int(batch) for batch in batches.split(",")],
        )


Cell = tuple[str, str, int, int]
"""Mode, drafter, batch, gamma."""


def compared(
    bundle: Path, sizes: Sizes, prompts: Prompts, plain: Mapping[str, Answers],
    max_tokens: int, threads: int,
) -> dict[Cell, int]:  # fmt: skip
    """Prompts whose tokens differ from the plain answers, by cell; a datastore holds half of these."""
    found: dict[Cell, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        texts = [list(one[: len(one) // 2]) for answers in plain.values() for one in answers]
        store = Path(folder) / "store"
        write_datastore(texts, store, vocab_size=load_bundle(bundle).manifest.target.vocab_size)
        drafting = DraftingConfig(datastore=str(store))
        rigs = {
            n: open_rig(bundle, max_batch=n, num_threads=threads, drafting=drafting)
            for n in sizes.batches
        }
        cells = list(itertools.product(MODES, sizes.drafters, sizes.batches, sizes.gammas))
        for name, drafter, batch, gamma in track(cells, description="comparing"):
            temperature, mode = MODES[name]
            speculation = SpeculationParams(drafter=drafter, gamma=gamma, mode=mode)
            got = completions(
                rigs[batch], prompts, quoted(speculation, plain[name]), SamplingParams(temperature=temperature),
                max_tokens, random.Random(gamma),
            )  # fmt: skip
            different = (one != other for one, other in zip(got, plain[name], strict=True))
            found[name, drafter, batch, gamma] = sum(different)
        for rig in rigs.values():
            rig.close()
    return found


def report(found: Mapping[Cell, int], sizes: Sizes, num_prompts: int, title: str) -> None:
    """Print a line per mode and drafter, all batches together, and every cell that differs."""
    num_answers = num_prompts * len(sizes.batches)
    table = Table(title=f"{title}: answers that differ from plain decoding, of {num_answers} each")
    for head in ("mode", "drafter", *(f"gamma {gamma}" for gamma in sizes.gammas)):
        table.add_column(head, justify="right")
    for probs, drafter in itertools.product(MODES, sizes.drafters):
        sums = [
            sum(found[probs, drafter, batch, gamma] for batch in sizes.batches)
            for gamma in sizes.gammas
        ]
        table.add_row(probs, drafter, *map(str, sums))
    console = Console(width=150)
    console.print(table)
    for (params, drafter, batch, gamma), count in found.items():
        if count:
            console.print(f"{params}, {drafter}, batch {batch}, gamma {gamma}: {count} differ")
    total = len(found) * num_prompts
    console.print(f"{len(found)} cells, {sum(found.values())} of {total} answers differ")


def main(
    bundle: Path,
    num_prompts: int = 50,
    max_tokens: int = 128,
    gammas: str = "1,2,3,4,5,6,7,8",
    batches: str = "1,3,8",
    drafters: str = "model,lookup",
    matrix: bool = False,
    threads: int = 2,
) -> None:
    """Compare every drafter, gamma and batch size with plain decoding, greedy and seed_stable at temperature 1.

    Drafters "all": those of the registry and some composed of them, with a datastore of half of the answers.
    --matrix: all of them, gammas 0 to 8, batches 1 to 5, few and short answers: some minutes.
    """
    if matrix:
        num_prompts, max_tokens, gammas, batches, drafters = MATRIX
    sizes = Sizes.of(drafters, gammas, batches)
    alone = open_rig(bundle, max_batch=1, num_threads=threads)
    has_encoder = alone.bundle.manifest.text2text is not None
    # Functions are longer than messages, so that sources of many lengths stand beside each other.
    texts = (
        [
            *task_sources("translate", num_prompts // 2),
            *task_sources("summarize", -(-num_prompts // 2)),
        ]
        if has_encoder
        else code_prompts(num_prompts)
    )
    prompts = [prompt_of(text, alone.tokenizer) for text in texts]
    plain = plain_answers(alone, prompts, max_tokens)
    alone.close()
    found = compared(bundle, sizes, prompts, plain, max_tokens, threads)
    report(found, sizes, num_prompts, f"{bundle.name}, {num_prompts} x {max_tokens} tokens")
    raise SystemExit(any(found.values()))


if __name__ == "__main__":
    typer.run(main)
