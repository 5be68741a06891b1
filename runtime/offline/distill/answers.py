"""The target's own answers to a user's prompts, in a file that a killed run goes on with.

The first line of the file says what was asked; each other line is an answer. Of the answers to one prompt the first is
greedy for one half of the prompts and sampled for the other, the second the other way round, and all further ones are
sampled. Every ``HELD_OUT``-th prompt is held out, with all its answers.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.speed import PLAIN, Report

HELD_OUT = 20
GROUP = 32
"""Answers that are asked for together, and lost together by a kill: the more, the fewer slots wait for the longest."""
TOP_P = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt with one answer to it.

    Attributes:
        prompt: number of the prompt, from 0.
        attempt: number of the answer to it, from 0.
        num_prompt: tokens of the prompt, of ``tokens``.
        tokens: of prompt and answer, with the end token if it ended.
    """

    prompt: int
    attempt: int
    num_prompt: int
    tokens: tuple[int, ...]

    @property
    def is_held_out(self) -> bool:
        """Whether nothing may be learnt from it."""
        return self.prompt % HELD_OUT == HELD_OUT - 1

    @property
    def is_greedy(self) -> bool:
        """Whether it was written at temperature 0; else at 1."""
        return is_greedy(self.prompt, self.attempt)

    @property
    def answer(self) -> tuple[int, ...]:
        """Tokens of the answer."""
        return self.tokens[self.num_prompt :]


def is_greedy(prompt: int, attempt: int) -> bool:
    """Return whether a prompt's answer of this number is greedy; half of those that are held out are, too."""
    return attempt < 2 and (prompt // HELD_OUT + prompt + attempt) % 2 == 0


def write_answers(
    rig: Rig,
    prompts: Prompts,
    file: Path,
    *,
    num_answers: int,
    max_tokens: int,
    most_s: float,
    report: Report,
    clock: Callable[[], float] = time.monotonic,
) -> list[Written]:
    """Return the target's answers, those of an earlier run of the same prompts included.

    Args:
        rig: the open target; nothing is drafted.
        prompts: to answer.
        file: which each answer is added to.
        num_answers: to each prompt.
        max_tokens: of an answer.
        most_s: seconds after which no further answers are asked for.
        report: called with the phase, the answers there are and how many are wanted.
        clock: seconds.

    Raises:
        ConfigError: there are fewer than ``HELD_OUT`` prompts, so that none would be held out, or the file holds
            answers to other prompts.
    """
    if len(prompts) < HELD_OUT:
        raise ConfigError("prompts", f"must be at least {HELD_OUT}: one in {HELD_OUT} is held out")
    done = _read(file, _asked(rig, prompts, max_tokens))
    known = {(one.attempt, one.prompt) for one in done}
    # In an order by chance: where time ends first, those answered are of all kinds that the file has.
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    wanted = [
        (attempt, prompt)
        for attempt in range(num_answers)
        for prompt in order
        if (attempt, prompt) not in known
    ]
    total, began = len(done) + len(wanted), clock()
    with file.open("a", encoding="utf-8") as lines:
        for group in _groups(wanted):
            if clock() - began > most_s:
                break
            found = _answer(rig, prompts, group, max_tokens)
            lines.writelines(_line(one) for one in found)
            lines.flush()
            done += found
            report("answers", len(done), total)
    return sorted(done, key=lambda one: (one.attempt, one.prompt))


def _groups(wanted: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield what is answered together, by number: all of it greedy, or none."""
    for first in range(0, len(wanted), 2 * GROUP):
        both = sorted(wanted[first : first + 2 * GROUP])
        for kind in (True, False):
            if group := [one for one in both if is_greedy(one[1], one[0]) is kind]:
                yield group


def _answer(
    rig: Rig, prompts: Prompts, group: Sequence[tuple[int, int]], max_tokens: int
) -> list[Written]:
    attempt, prompt = group[0]
    params = SamplingParams(
        temperature=0.0 if is_greedy(prompt, attempt) else 1.0,
        top_p=TOP_P,
        end_token_ids=rig.bundle.manifest.eos_token_ids,
    )
    asked = [prompts[prompt] for _, prompt in group]
    seed = attempt * len(prompts) + prompt
    answers, _ = rig.answer(asked, params, PLAIN, max_tokens, first_seed=seed)
    return [
        Written(
            prompt=prompt,
            attempt=attempt,
            num_prompt=len(prompts[prompt].tokens),
            tokens=(*prompts[prompt].tokens, *answer.tokens),
        )
        for (attempt, prompt), answer in zip(group, answers, strict=True)
    ]


def _asked(rig: Rig, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Return the first line of a file of answers."""
    tokens = json.dumps([prompt.tokens for prompt in prompts])
    return {
        "tokenizer": rig.bundle.manifest.files[TOKENIZER_FILE].sha256,
        "prompts": hashlib.sha256(tokens.encode()).hexdigest(),
        "max_tokens": max_tokens,
    }


def _read(file: Path, asked: dict[str, Any]) -> list[Written]:
    """Return the answers in a file, which is begun where there is none; a last line that was cut off goes.

    Raises:
        ConfigError: they were asked for otherwise.
    """
    kept = []
    if file.exists():
        kept = [line for line in file.read_text("utf-8").splitlines(True) if line.endswith("\n")]
    if kept and json.loads(kept[0]) != asked:
        raise ConfigError(
            "out",
            f"{file}: holds answers to other prompts, of another length or tokenizer; choose another folder",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    # A kill meanwhile must not take the answers that there are.
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text("".join(kept or [json.dumps(asked) + "\n"]), "utf-8")
    unfinished.replace(file)
    found = [json.loads(line) for line in kept[1:]]
    return [Written(**{**one, "tokens": tuple(one["tokens"])}) for one in found]


def _line(one: Written) -> str:
    fields = {"prompt": one.prompt, "attempt": one.attempt, "num_prompt": one.num_prompt}
    return json.dumps({**fields, "tokens": one.tokens}) + "\n"
