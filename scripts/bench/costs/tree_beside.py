"""What one request with trees of drafts costs the others of its batch: processor time of their answers.

Three ways take turns with the same seeds, each in one batch without a queue: the chains alone, the tree request alone,
and all together. The cost of the others is what all together take less what the tree request takes alone, over what the
chains take alone; 1 where it costs them nothing. Everybody's tokens are held against those of the other ways.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import Failed
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.offline.rig import Answer, Rig, RigOptions, open_rig

from scripts.bench.tools.common import code_prompts
from scripts.bench.tools.results import Recorder, Row
from scripts.bench.tools.tables import show

CHAINS, TREE, BOTH = "chains", "tree", "both"
WAYS = (CHAINS, TREE, BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one run.

    Attributes:
        chains: prompts of the requests with chains.
        tree: prompt of the one with trees.
        max_tokens: of an answer with chains.
        tree_tokens: of the one with trees; more, for it should last as long as all the others.
        chain_drafter: of the chains; the tree's is ``tree``.
    """

    chains: Sequence[tuple[int, ...]]
    tree: tuple[int, ...]
    max_tokens: int
    tree_tokens: int
    gamma: int
    temperature: float
    chain_drafter: str = "model"


def run(rig: Rig, load: Load, way: str) -> tuple[list[tuple[int, ...]], float]:
    """Return the tokens of every answer, the tree request's last, and the processor seconds they took."""
    specs = [] if way == TREE else [
        _spec(rig, load, prompt, seed, load.chain_drafter, load.max_tokens)
        for seed, prompt in enumerate(load.chains)
    ]  # fmt: skip
    if way != CHAINS:
        # Among the first, so that it takes a slot at once, with chains on both sides of it.
        specs.insert(1, _spec(rig, load, load.tree, len(load.chains), "tree", load.tree_tokens))
    answers = {spec.seed: Answer(clock=rig.clock) for spec in specs}
    began = rig.clock()
    for spec in specs:
        rig.worker.submit(spec, answers[spec.seed])
    while any(answer.end is None for answer in answers.values()):
        rig.worker.run_step()
    took_s = rig.clock() - began
    if any(isinstance(answer.end, Failed) for answer in answers.values()):
        raise RuntimeError("a measured request failed")
    return [tuple(answers[seed].tokens) for seed in sorted(answers)], took_s


def measure(rig: Rig, load: Load, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of each way's rounds, a first one left out, and a digest of everybody's tokens.

    Raises:
        RuntimeError: somebody's tokens depend on who is beside.
    """
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for number in range(rounds + 1):
        for way in WAYS:
            found, took_s = run(rig, load, way)
            if tokens.setdefault(way, found) != found:
                raise RuntimeError(f"{way}: tokens changed from one round to the next")
            if number:
                seconds[way].append(took_s)
    if tokens[BOTH] != tokens[CHAINS] + tokens[TREE]:
        raise RuntimeError("tokens depend on who is beside")
    return seconds, hashlib.sha256(repr(tokens[BOTH]).encode()).hexdigest()[:16]


def _spec(
    rig: Rig, load: Load, prompt: tuple[int, ...], seed: int, drafter: str, max_tokens: int
) -> RequestSpec:
    rig.next_id += 1
    name = f"bench-{rig.next_id}"
    return RequestSpec(
        internal_id=name,
        request_id=name,
        prompt_tokens=prompt,
        params=SamplingParams(temperature=load.temperature),
        seed=seed,
        max_tokens=max_tokens,
        speculation=SpeculationParams(drafter=drafter, gamma=load.gamma, is_adaptive=False),
    )


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle with a draft model that takes trees.")],
    num_answers: Annotated[int, typer.Option(min=2, help="With chains.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Per answer with chains.")] = 32,
    tree_tokens: Annotated[int, typer.Option(min=2, help="Of the answer with trees.")] = 48,
    gamma: Annotated[int, typer.Option(min=1, help="Draft tokens of a chain or a path.")] = 4,
    temperature: Annotated[float, typer.Option(min=0.01, help="Above 0.")] = 1.0,
    drafter: Annotated[str, typer.Option(help="Of the chains.")] = "model",
    rounds: Annotated[int, typer.Option(min=1, help="Counted.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="More spin while they wait.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Print the processor seconds of each way, and what the tree request costs the others."""
    recorder = Recorder("tree_beside", "what a tree request costs its neighbours", threads)
    rig = open_rig(
        bundle, RigOptions(max_batch=num_answers + 1, num_threads=threads, counts_processor=True)
    )
    *chains, tree = [tuple(rig.tokenizer.encode(text)) for text in code_prompts(num_answers + 1)]
    load = Load(
        chains=chains,
        tree=tree,
        max_tokens=max_tokens,
        tree_tokens=tree_tokens,
        gamma=gamma,
        temperature=temperature,
        chain_drafter=drafter,
    )
    seconds, digest = measure(rig, load, rounds)
    rig.close()
    shares = [
        (both - alone) / plain
        for plain, alone, both in zip(*(seconds[way] for way in WAYS), strict=True)
    ]
    figures = {f"{way}_processor_s": statistics.median(seconds[way]) for way in WAYS}
    row = Row(
        case={"drafter": drafter, "tokens": digest},
        figures={**figures, "cost_of_the_others": statistics.median(shares)},
    )
    show([row])
    settings = {"num_answers": num_answers, "max_tokens": max_tokens, "tree_tokens": tree_tokens}
    recorder.write(out, [row], {**settings, "gamma": gamma, "temperature": temperature})


if __name__ == "__main__":
    typer.run(main)
