"""What all tables of the papers share: cells that are run once and kept, and what one run of a setting brings.

A table is a function of the context that returns its cells. A finished cell is appended to a file in the output
folder, and is not run again there under the same settings. All requests are answered one by one, and no two cells
share history.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.events import Finished
from outrider.runtime.core.params import Prompt, SpeculationParams
from outrider.runtime.offline.prompts import encode_prompts, read_prompts
from outrider.runtime.offline.rig import Rig, RigOptions, open_rig
from outrider.runtime.offline.speed import num_trials

from scripts.tools.results import Row, Scalar

PLAIN = SpeculationParams(is_enabled=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of a table: what is run, and the function that runs it and returns its figures."""

    case: Mapping[str, Scalar]
    measure: Callable[[], Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Sums of one setting over all prompts.

    Attributes:
        processor_s: seconds of all cores that this process used, threads that wait by spinning included.
        num_emitted: tokens that the ``num_steps`` passes of the target emitted; a request's first token is left out.
        num_trials: judged draft tokens, those behind a rejected one left out.
        tokens: a hash of the tokens of all answers, in order.
    """

    processor_s: float
    wall_s: float
    num_output: int
    num_emitted: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_trials: int
    draft_calls: int
    tokens: str

    def figures(self) -> dict[str, Scalar]:
        """Return the columns that every table of runs has."""
        return {
            "tokens_per_pass": self.num_emitted / self.num_steps,
            "draft_calls_per_pass": self.draft_calls / self.num_steps,
            "alpha_hat": self.num_accepted / self.num_trials if self.num_trials else None,
            "processor_ms_per_token": 1e3 * self.processor_s / self.num_output,
            "wall_ms_per_token": 1e3 * self.wall_s / self.num_output,
            "num_output": self.num_output,
            "tokens": self.tokens,
        }


@dataclass(slots=True)
class Context:
    """One invocation: the bundle, the prompts, and the one rig that is open.

    Attributes:
        others: prompts of the file that are not measured.
        datastore: a corpus that was given.
        window: columns of the draft's lookahead window in Ouroboros' tables; None for the paper's.
    """

    bundle: Path
    texts: tuple[str, ...]
    max_tokens: int
    threads: int
    out: Path
    others: tuple[str, ...] = ()
    datastore: Path | None = None
    window: int | None = None
    rig: Rig | None = None
    _opened: RigOptions | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, bundle: Path, prompts: Path, *, num_prompts: int, max_tokens: int, threads: int, out: Path,
        datastore: Path | None = None, window: int | None = None,
    ) -> Context:  # fmt: skip
        """Return the context of the first prompts of a file."""
        out.mkdir(parents=True, exist_ok=True)
        texts = read_prompts(prompts)
        others = texts[num_prompts:]
        return cls(bundle, texts[:num_prompts], max_tokens, threads, out, others, datastore, window)

    def open(self, **options: Any) -> Rig:
        """Return the rig with these fields of ``RigOptions``; the one that is open, where it has them."""
        wanted = RigOptions(**{"max_batch": 1, "num_threads": self.threads, **options})
        if self.rig is None or wanted != self._opened:
            self.close()
            self.rig, self._opened = open_rig(self.bundle, wanted), wanted
        return self.rig

    def close(self) -> None:
        """Close the rig, if one is open."""
        if self.rig is not None:
            self.rig.close()
        self.rig = self._opened = None

    def prompts(self, rig: Rig, *, are_others: bool = False) -> tuple[Prompt, ...]:
        """Return the prompts of the file as the rig's token ids; with ``are_others`` those that are not measured."""
        return encode_prompts(
            self.others if are_others else self.texts,
            rig.tokenizer,
            max_tokens=self.max_tokens,
            manifest=rig.bundle.manifest,
        )

    def run(
        self, rig: Rig, speculation: SpeculationParams, *, temperature: float = 0.0,
        prompts: Sequence[Prompt] | None = None, tenant: str | None = None,
    ) -> Run:  # fmt: skip
        """Answer prompts one after the other, as a tenant without history unless one is named.

        Seeds are the prompts' numbers, so that settings differ in nothing but themselves.
        """
        rig.tenant = f"cell-{rig.next_id}" if tenant is None else tenant
        params, digest = SamplingParams(temperature=temperature), hashlib.sha256()
        calls = rig.draft.num_calls if rig.draft else 0
        ends, num_output = [], 0
        processor_s, wall_s = time.process_time(), time.perf_counter()
        for seed, prompt in enumerate(self.prompts(rig) if prompts is None else prompts):
            (answer,), _ = rig.answer(
                [prompt], params, speculation, self.max_tokens, first_seed=seed
            )
            assert isinstance(answer.end, Finished), "a failed request raises"
            ends.append(answer.end.report)
            num_output += len(answer.tokens)
            digest.update(json.dumps(answer.tokens).encode())
        counts = ("num_emitted", "num_steps", "num_drafted", "num_accepted")
        return Run(
            processor_s=time.process_time() - processor_s,
            wall_s=time.perf_counter() - wall_s,
            num_output=num_output,
            num_trials=sum(map(num_trials, ends)),
            draft_calls=(rig.draft.num_calls if rig.draft else 0) - calls,
            tokens=digest.hexdigest()[:12],
            **{name: sum(getattr(one, name) for one in ends) for name in counts},
        )

    def recorded(self, table: str, case: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the figures of a cell that has been run under these settings.

        Raises:
            KeyError: it has not.
        """
        return _recorded(self.out / f"{table}.jsonl", self.settings())[_key(case)]

    def settings(self) -> dict[str, Scalar]:
        """Return what distinguishes the cells of one invocation from those of others."""
        prompts = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:12]
        found: dict[str, Scalar] = {
            "bundle": self.bundle.name, "num_prompts": len(self.texts), "prompts": prompts,
            "max_tokens": self.max_tokens, "threads": self.threads,
        }  # fmt: skip
        return found if self.window is None else {**found, "window": self.window}


Table = Callable[[Context], Iterable[Cell]]


def run_table(context: Context, name: str, table: Table) -> list[Row]:
    """Return a table's rows, those on record and those that this call runs and records.

    Raises:
        ValueError: two cells have one case.
    """
    path, settings = context.out / f"{name}.jsonl", context.settings()
    rows: dict[str, Row] = {}
    known = _recorded(path, settings)
    for cell in table(context):
        key = _key(cell.case)
        if key in rows:
            raise ValueError(f"{name}: two cells of {key}")
        if key not in known:
            known[key] = dict(cell.measure())
            line = {"settings": settings, "case": dict(cell.case), "figures": known[key]}
            with path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        rows[key] = Row(case=cell.case, figures=known[key])
    return list(rows.values())


def _recorded(path: Path, settings: Mapping[str, Scalar]) -> dict[str, dict[str, Scalar]]:
    """Return the figures on record under these settings, by case; a line that a kill cut short is none."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return {_key(one["case"]): one["figures"] for one in whole if one["settings"] == settings}


def _key(case: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(case), sort_keys=True)
