"""What benchmarks of drafters share: tasks, settings, and one run of a setting with the drafting's own time taken.

Three tasks: completing code; editing, where the target answers a prompt that holds its own answer to nearly the same
prompt; and noise, random tokens completed at a high temperature, where nothing is ever found again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import runtime.step
from engines.laws import SamplingLaw
from runtime.core.params import SpeculationParams
from scripts.bench_common import Rig, code_prompts

TEMPERATURES = {"code": 0.0, "edit": 0.0, "noise": 1.5}
NOISE_LENGTH = 60
EDITED_TOKENS = 10
NUM_CODE = 100

Prompt = tuple[list[int], tuple[int, ...]]
"""Tokens of a prompt, and of a text that the answer may quote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to draft; ``params`` are fields of ``SpeculationParams`` beside drafter and gamma."""

    drafter: str
    gamma: int = 0
    params: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        if self.drafter == "none":
            return "none"
        more = "".join(f" {name} {value}" for name, value in self.params)
        return f"{self.drafter} gamma {self.gamma}{more}"

    def speculation(self, reference: tuple[int, ...] = ()) -> SpeculationParams:
        """As a request would ask for it."""
        return SpeculationParams(
            is_enabled=self.drafter != "none",
            drafter=self.drafter,
            gamma=self.gamma,
            reference_tokens=reference if "reference" in self.drafter else (),
            **dict(self.params),
        )


PLAIN = Setting(drafter="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one setting did on one task.

    Attributes:
        host_share: time in drafting and its bookkeeping, without engine and sampler, of the whole; None where it was
            not taken.
        draft_passes: calls of the draft model per pass of the target.
    """

    tokens_per_s: float
    tokens_per_step: float
    utilization: float | None
    host_share: float | None
    draft_passes: float


@dataclass(slots=True)
class Bench:
    """A rig, and the seconds spent around its drafters, less what the draft model and the sampler took of them.

    The seconds are taken between entering and leaving it, one bench at a time: the functions that the step calls are
    wrapped.
    """

    rig: Rig
    host_s: float = 0.0
    _plain: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _num_tenants: int = 0

    def __enter__(self) -> Bench:
        for name in ("propose", "tell"):
            self._plain[name] = getattr(runtime.step, name)
            setattr(runtime.step, name, self._timed(self._plain[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, inner in self._plain.items():
            setattr(runtime.step, name, inner)
        self.rig.close()

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began, other = time.perf_counter(), self._other_s()
            try:
                return inner(*args, **options)
            finally:
                self.host_s += time.perf_counter() - began - (self._other_s() - other)

        return timed

    def _other_s(self) -> float:
        return self.rig.engine_s() + self.rig.sampler.total_s

    def forget(self) -> None:
        """Drafters have no history from now on: the next requests are another tenant's."""
        self._num_tenants += 1
        self.rig.tenant = f"bench-{self._num_tenants}"

    def run(
        self,
        setting: Setting,
        task: str,
        prompts: Sequence[Prompt],
        max_tokens: int,
        batch: int = 1,
    ) -> Cell:
        """One run of a setting over the prompts, ``batch`` at a time."""
        rig, host_before, wall_s, num_output = self.rig, self.host_s, 0.0, 0
        calls_before = rig.draft.num_calls if rig.draft else 0
        reports = []
        law = SamplingLaw(temperature=TEMPERATURES[task])
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            # One reference for the group: the rig gives all requests of a run the same parameters.
            speculation = setting.speculation(group[0][1])
            finished, took_s = rig.run([ids for ids, _ in group], law, speculation, max_tokens)
            wall_s += took_s
            num_output += sum(one.num_output for one in finished)
            reports += [one.report for one in finished]
        num_drafted = sum(report.num_drafted for report in reports)
        num_steps = sum(report.num_steps for report in reports)
        num_calls = (rig.draft.num_calls if rig.draft else 0) - calls_before
        return Cell(
            tokens_per_s=num_output / wall_s,
            tokens_per_step=num_output / num_steps,
            utilization=sum(one.num_accepted for one in reports) / num_drafted
            if num_drafted
            else None,
            host_share=(self.host_s - host_before) / wall_s if self._plain else None,
            draft_passes=num_calls * batch / num_steps,
        )


@dataclass(frozen=True, slots=True)
class CodePrompts:
    """Heads of functions, in an order without locality, for purposes that share none.

    Attributes:
        measured: what figures are taken on.
        tuning: what settings are chosen on.
        others: all the rest: an earlier history, a corpus.
    """

    measured: list[Prompt]
    tuning: list[Prompt]
    others: list[Prompt]

    @classmethod
    def of(cls, rig: Rig, count: int) -> CodePrompts:
        """``count`` measured ones."""
        texts = code_prompts(NUM_CODE)
        random.Random(0).shuffle(texts)
        encoded = [list(rig.tokenizer.encode(text)) for text in texts]
        prompts = [(ids, tuple(ids)) for ids in encoded]
        num_tuning = max(1, count // 2)
        return cls(
            prompts[:count], prompts[count : count + num_tuning], prompts[count + num_tuning :]
        )


def edit_task(rig: Rig, prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """A text with the target's own answer to it, then the text again without its first tokens.

    The target goes on much as it did before, with small changes: it repeats given code.
    """
    off, law = PLAIN.speculation(), SamplingLaw(temperature=0.0)
    tasks = []
    for prompt, _ in prompts:
        (answer,), _ = rig.answer([prompt], law, off, max_tokens)
        tasks.append(([*prompt, *answer.tokens, *prompt[EDITED_TOKENS:]], tuple(answer.tokens)))
    return tasks


def noise_task(rig: Rig, count: int) -> list[Prompt]:
    """Random tokens."""
    rng = random.Random(1)
    vocab_size = rig.target.limits.vocab_size
    prompts = [[rng.randrange(5, vocab_size) for _ in range(NOISE_LENGTH)] for _ in range(count)]
    return [(prompt, tuple(prompt)) for prompt in prompts]


def median(cells: Sequence[Cell]) -> Cell:
    """The cell of middle speed."""
    return sorted(cells, key=lambda cell: cell.tokens_per_s)[len(cells) // 2]
