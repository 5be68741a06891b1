"""Shared by benchmarks of drafters: tasks, settings, and one run of a setting with the drafting's own time taken.

Three tasks: completing code; editing, where the target answers a prompt that holds its own answer to nearly the same
prompt; and noise, random tokens completed at a high temperature, where nothing is ever found again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.loop import step

from scripts.tools.common import Rig, code_prompts

TEMPERATURES = {"code": 0.0, "edit": 0.0, "noise": 1.5}
NOISE_LENGTH = 60
EDITED_TOKENS = 10
NUM_CODE = 100

Prompt = tuple[list[int], tuple[int, ...]]
"""Tokens of a prompt, and of a text that the answer may quote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to draft."""

    drafter: str
    gamma: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        if self.drafter == "none":
            return "none"
        return f"{self.drafter} gamma {self.gamma}"

    def speculation(self, reference: tuple[int, ...] = ()) -> SpeculationParams:
        """As a request would ask for it."""
        return SpeculationParams(
            is_enabled=self.drafter != "none",
            drafter=self.drafter,
            gamma=self.gamma,
            reference_tokens=reference if "reference" in self.drafter else (),
        )


PLAIN = Setting(drafter="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums of one setting over some prompts; tallies add up.

    Attributes:
        wall_s: seconds of the rig's clock.
        host_s: seconds in drafting and its bookkeeping, without engine and sampler.
        num_emitted: tokens of ``num_output`` that the passes counted emitted.
        draft_rows: calls of the draft model, times the rows of the batch.
    """

    wall_s: float = 0.0
    host_s: float = 0.0
    num_output: int = 0
    num_emitted: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_rows: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        mine, others = asdict(self), asdict(other)
        return Tally(**{name: mine[name] + others[name] for name in mine})

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_output / self.wall_s

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per pass of the target and row."""
        return self.num_emitted / self.num_steps

    def figures(self) -> dict[str, float | None]:
        """Return its figures by name; None where there is no such figure."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_step": self.tokens_per_step,
            "utilization": self.num_accepted / self.num_drafted if self.num_drafted else None,
            "draft_passes": self.draft_rows / self.num_steps,
            # Nothing takes no time at all: it was not taken.
            "host_share": self.host_s / self.wall_s if self.host_s else None,
        }


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
        for name in ("propose", "report_outcomes"):
            self._plain[name] = getattr(step, name)
            setattr(step, name, self._timed(self._plain[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, inner in self._plain.items():
            setattr(step, name, inner)
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

    def run(self, setting: Setting, task: str, group: Sequence[Prompt], max_tokens: int) -> Tally:
        """One run of a setting over prompts that arrive together."""
        rig, host_before = self.rig, self.host_s
        calls_before = rig.draft.num_calls if rig.draft else 0
        # One reference for the group: the rig gives all requests of a run the same parameters.
        finished, wall_s = rig.run(
            [ids for ids, _ in group],
            SamplingParams(temperature=TEMPERATURES[task]),
            setting.speculation(group[0][1]),
            max_tokens,
        )
        num_calls = (rig.draft.num_calls if rig.draft else 0) - calls_before
        counts = ("num_emitted", "num_steps", "num_drafted", "num_accepted")
        return Tally(
            wall_s=wall_s,
            host_s=self.host_s - host_before,
            num_output=sum(one.num_output for one in finished),
            draft_rows=num_calls * len(group),
            **{name: sum(getattr(one.report, name) for one in finished) for name in counts},
        )


@dataclass(slots=True)
class Line:
    """A setting on a bench, with the history of a tenant of its own.

    Attributes:
        max_tokens: of every answer.
    """

    bench: Bench
    setting: Setting
    task: str
    max_tokens: int
    tenant: str = ""

    def begin(self) -> None:
        """Forget all history."""
        self.bench.forget()
        self.tenant = self.bench.rig.tenant

    def run(self, group: Sequence[Prompt]) -> Tally:
        """One run, as the line's own tenant."""
        self.bench.rig.tenant = self.tenant
        return self.bench.run(self.setting, self.task, group, self.max_tokens)


def compare(
    lines: Mapping[str, Line],
    prompts: Sequence[Prompt],
    *,
    rounds: int,
    batch: int = 1,
) -> dict[str, list[Tally]]:
    """Return the tallies of each line, one per group of prompts; the lines take turns group by group.

    Whatever disturbs the machine for a second or more so hits all lines. Each round begins without history.
    """
    found: dict[str, list[Tally]] = {name: [] for name in lines}
    for _ in range(rounds):
        for line in lines.values():
            line.begin()
        for start in range(0, len(prompts), batch):
            for name, line in lines.items():
                found[name].append(line.run(prompts[start : start + batch]))
    return found


def total(tallies: Sequence[Tally]) -> Tally:
    """All together."""
    return sum(tallies, Tally())


def speed_over(tallies: Sequence[Tally], base: Sequence[Tally]) -> float:
    """The median of the speed-ups over the groups that both ran."""
    pairs = zip(tallies, base, strict=True)
    return statistics.median(one.tokens_per_s / other.tokens_per_s for one, other in pairs)


def code_task(rig: Rig, count: int) -> list[Prompt]:
    """Heads of functions, in an order without locality."""
    texts = code_prompts(NUM_CODE)
    random.Random(0).shuffle(texts)
    encoded = [list(rig.tokenizer.encode(text)) for text in texts[:count]]
    return [(ids, tuple(ids)) for ids in encoded]


def edit_task(rig: Rig, prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    """A text with the target's own answer to it, then the text again without its first tokens.

    The target goes on much as it did before, with small changes: it repeats given code.
    """
    off, params = PLAIN.speculation(), SamplingParams(temperature=0.0)
    tasks = []
    for prompt, _ in prompts:
        (answer,), _ = rig.answer([prompt], params, off, max_tokens)
        tasks.append(([*prompt, *answer.tokens, *prompt[EDITED_TOKENS:]], tuple(answer.tokens)))
    return tasks


def noise_task(rig: Rig, count: int) -> list[Prompt]:
    """Random tokens."""
    rng = random.Random(1)
    vocab_size = rig.target.limits.vocab_size
    prompts = [[rng.randrange(5, vocab_size) for _ in range(NOISE_LENGTH)] for _ in range(count)]
    return [(prompt, tuple(prompt)) for prompt in prompts]
