"""What the benchmarks share: prompts, timed wrappers around engine and sampler, a run of one batch in process."""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines import open_engine
from engines.base import Engine, EngineLimits, FloatArray, Span
from engines.bundle import Bundle, load_bundle
from engines.cpu_sampler import CpuSampler
from engines.laws import SamplingLaw, SamplingRow, Verdict
from runtime.core.config import ServerConfig
from runtime.core.drafting import DraftingConfig
from runtime.core.params import Event, Failed, Finished, RequestSpec, SpeculationParams
from runtime.server import ServeOptions, bundle_costs
from runtime.tokenizer import TokenizersCodec
from runtime.worker import Worker

PROMPT_MODULES = (
    "argparse",
    "ast",
    "bdb",
    "calendar",
    "cgi",
    "cmd",
    "codecs",
    "configparser",
    "csv",
    "dis",
)


def code_prompts(count: int, num_lines: int = 12) -> list[str]:
    """Heads of top-level functions and classes of the standard library, the same on every machine of one Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    per_module = -(-count // len(PROMPT_MODULES))
    prompts = []
    for name in PROMPT_MODULES:
        lines = (library / f"{name}.py").read_text().splitlines(keepends=True)
        heads = [
            i
            for i, line in enumerate(lines)
            if line.startswith(("def ", "class ")) and i >= num_lines
        ]
        prompts += ["".join(lines[head - num_lines + 2 : head + 2]) for head in heads[:per_module]]
    return prompts[:count]


@dataclass(slots=True)
class TimedEngine:
    """An engine that adds up the seconds spent in its extends, by shape (rows, tokens)."""

    engine: Engine
    total_s: float = 0.0
    num_calls: int = 0

    @property
    def limits(self) -> EngineLimits:
        """Capacities of the timed engine."""
        return self.engine.limits

    @property
    def is_row_invariant(self) -> bool:
        """Promise of the timed engine."""
        return self.engine.is_row_invariant

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        """Extend and take the time."""
        began = time.perf_counter()
        logits = self.engine.extend(spans)
        self.total_s += time.perf_counter() - began
        self.num_calls += 1
        return logits

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep a path of the timed engine's tree."""
        self.engine.keep_path(slot, path)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Move a slot of the timed engine."""
        self.engine.move_slot(source, destination, length)

    def trim(self, lengths: Sequence[int]) -> None:
        """Trim the timed engine."""
        self.engine.trim(lengths)

    def close(self) -> None:
        """Close the timed engine."""
        self.engine.close()


@dataclass(slots=True)
class TimedSampler:
    """A sampler that adds up the seconds spent in it."""

    sampler: CpuSampler
    total_s: float = 0.0

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Propose and take the time."""
        began = time.perf_counter()
        tokens = self.sampler.propose(logits, rows, vocab_size=vocab_size)
        self.total_s += time.perf_counter() - began
        return tokens

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge and take the time."""
        began = time.perf_counter()
        verdicts = self.sampler.judge(logits, rows)
        self.total_s += time.perf_counter() - began
        return verdicts


@dataclass(slots=True)
class Rig:
    """One bundle opened in process, with timers on everything that is not the runtime itself."""

    bundle: Bundle
    target: TimedEngine
    draft: TimedEngine | None
    sampler: TimedSampler
    tokenizer: TokenizersCodec
    worker: Worker
    clock: Callable[[], float] = time.perf_counter
    next_id: int = 0
    finished: list[Finished] = field(default_factory=list)

    def engine_s(self) -> float:
        """Seconds spent in engine calls so far."""
        return self.target.total_s + (self.draft.total_s if self.draft else 0.0)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        law: SamplingLaw,
        speculation: SpeculationParams,
        max_tokens: int,
    ) -> tuple[list[Finished], float]:
        """Run prompts as one batch of arrivals to the end; their answers and the wall seconds taken.

        Raises:
            RuntimeError: a request failed.
        """
        done: list[Event] = []

        def deliver(event: Event) -> None:
            if isinstance(event, Finished | Failed):
                done.append(event)

        began = self.clock()
        for seed, prompt in enumerate(prompts):
            self.next_id += 1
            name = f"bench-{self.next_id}"
            spec = RequestSpec(
                internal_id=name, request_id=name, prompt_tokens=tuple(prompt), law=law, seed=seed,
                max_tokens=max_tokens, speculation=speculation,
            )  # fmt: skip
            self.worker.submit(spec, deliver)
        while len(done) < len(prompts):
            self.worker.run_step()
        wall_s = self.clock() - began
        finished = []
        for event in done:
            if isinstance(event, Failed):
                raise RuntimeError(f"a benchmark request failed: {event.error}")
            finished.append(event)
        return finished, wall_s


def open_rig(
    root: Path, *, max_batch: int = 8, num_threads: int = 2, costs: Path | None = None,
    clock: Callable[[], float] = time.perf_counter, drafting: DraftingConfig | None = None,
) -> Rig:  # fmt: skip
    """Open a bundle for benchmarks; requests wait for a slot as long as it takes.

    Step costs are kept in the folder ``costs``; None leaves them unknown, and every gamma fixed.
    """
    bundle = load_bundle(root)
    tokenizer = TokenizersCodec(root / "tokenizer.json")
    config = ServerConfig(
        max_running=max_batch, queue_timeout_s=math.inf, num_threads=num_threads,
        drafting=drafting or DraftingConfig(),
    )  # fmt: skip
    table = None
    if costs is not None:
        options = ServeOptions(costs_folder=costs, config=config)
        plain = CpuSampler(
            max_batch=max_batch,
            max_gamma=bundle.manifest.max_gamma,
            vocab_size=bundle.manifest.target.vocab_size,
        )
        table = bundle_costs(bundle, options, plain, tokenizer, max_batch, clock)
    target = TimedEngine(
        open_engine(bundle, "target", num_threads=num_threads, max_batch=max_batch)
    )
    draft = None
    if bundle.manifest.draft is not None:
        draft = TimedEngine(
            open_engine(bundle, "draft", num_threads=num_threads, max_batch=max_batch)
        )
    max_gamma = bundle.manifest.max_gamma
    sampler = TimedSampler(
        CpuSampler(max_batch=max_batch, max_gamma=max_gamma, vocab_size=target.limits.vocab_size)
    )
    worker = Worker(
        target=target, draft=draft, sampler=sampler, config=config, max_gamma=max_gamma,
        decoder=tokenizer, costs=table, clock=clock,
    )  # fmt: skip
    return Rig(
        bundle=bundle,
        target=target,
        draft=draft,
        sampler=sampler,
        tokenizer=tokenizer,
        worker=worker,
        clock=clock,
    )
