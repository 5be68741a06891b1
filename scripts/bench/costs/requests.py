"""What kinds of requests cost against a plain one: kept prefixes, several completions, forms, scored prompts.

Every kind runs beside what it is compared with, in turns, in one process (``outrider.LLM``). Below 1 is cheaper;
its 95 % interval is over the paired rounds. Prompts are random tokens, so that no two begin alike by chance.

    python -m scripts.bench.costs.requests BUNDLE --prompt-tokens 900
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from outrider.runtime.offline.llm import LLM

from scripts.bench.tools.paired import interval

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FIRST = {"max_tokens": 1, "temperature": 0.0}
# Speculation is off, so that a pass is a token unless the form forces some.
PLAIN = {"temperature": 0.0, "ignore_eos": True, "speculation": {"enabled": False}}
FORM = {"temperature": 0.0, "speculation": {"enabled": False}, "json_schema": PERSON}


class Requests:
    """Requests of one kind each, with prompts of their own.

    Args:
        llm: who answers.
        num_tokens: of a prompt.
    """

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self._llm = llm
        self._num_tokens = num_tokens
        info = llm.info()
        self._vocab_size = info.vocab_size
        self._num_samples = min(8, info.limits.max_n)
        self._random = np.random.default_rng(0)

    def prompt(self) -> list[int]:
        """Return a prompt that nobody asked before."""
        return self._random.integers(0, self._vocab_size, self._num_tokens).tolist()

    def seconds(self, prompts: list[list[int]], params: dict[str, Any]) -> float:
        """Return how long it takes to answer prompts together."""
        began_s = time.perf_counter()
        self._llm.generate(prompts, params)
        return time.perf_counter() - began_s

    def kept(self) -> tuple[float, float]:
        """Return the first token of a prompt that was asked before, and of one that was not."""
        prompt = self.prompt()
        cold_s = self.seconds([prompt], FIRST)
        return self.seconds([prompt], FIRST), cold_s

    def group(self) -> tuple[float, float]:
        """Return the first tokens of eight completions of a prompt at most, and of as many prompts."""
        drawn = {"max_tokens": 1, "temperature": 1.0, "seed": 7}
        apart = [self.prompt() for _ in range(self._num_samples)]
        together_s = self.seconds([self.prompt()], {**drawn, "n": self._num_samples})
        return together_s, self.seconds(apart, drawn)

    def scored(self) -> tuple[float, float]:
        """Return a prompt whose tokens all get log-probabilities, and a plain one."""
        scored_s = self.seconds([self.prompt()], {**FIRST, "prompt_logprobs": 0})
        return scored_s, self.seconds([self.prompt()], FIRST)

    def form(self) -> tuple[float, float]:
        """Return a token of compact JSON, forced ones included, and a token of plain text."""
        prompt = self.prompt()[:16]
        params = {**FORM, "disable_any_whitespace": True, "max_tokens": 48}
        began_s = time.perf_counter()
        (answer,) = self._llm.generate([prompt], params)
        num_tokens = max(1, len(answer.outputs[0].token_ids))
        per_token_s = (time.perf_counter() - began_s) / num_tokens
        return per_token_s, self.seconds([prompt], {**PLAIN, "max_tokens": num_tokens}) / num_tokens


KINDS: dict[str, Callable[[Requests], tuple[float, float]]] = {
    "first token, prompt kept / cold": Requests.kept,
    "first tokens, n completions / n prompts": Requests.group,
    "prompt scored / plain": Requests.scored,
    "token of compact JSON / plain": Requests.form,
}


def main(
    bundle: Path,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of a prompt.")] = 900,
    rounds: Annotated[int, typer.Option(min=1, help="Of every kind, in turns.")] = 9,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the ratio of each kind with its interval."""
    with LLM(bundle, num_threads=threads) as llm:
        requests = Requests(llm, prompt_tokens)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        for measure in KINDS.values():
            measure(requests)  # warms up: graphs, grammars, pages
        for _ in range(rounds):
            for name, measure in KINDS.items():
                found[name].append(measure(requests))
    for name, pairs in found.items():
        ratio = interval([one for one, _ in pairs], [other for _, other in pairs])
        typer.echo(f"{name}: {ratio.ratio:.3f} ({ratio.low:.3f}, {ratio.high:.3f})")


if __name__ == "__main__":
    typer.run(main)
