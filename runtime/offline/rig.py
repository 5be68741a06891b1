"""Opens a bundle in process as the server does, with timers on engines and sampler."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from outrider.engines.base import Engine
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import choose_device, open_engine
from outrider.engines.pair import Pair
from outrider.engines.sampling.base import SamplingParams
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Event, Failed, Finished, Progressed
from outrider.runtime.core.params import BeamParams, Prompt, RequestSpec, SpeculationParams
from outrider.runtime.drafters.registry import any_proposes_trees
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.offline.timers import TimedEngine, TimedSampler
from outrider.runtime.serving.factory import bundle_costs, open_engines, settle_loaded
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.tokenizer import TokenizersCodec, open_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class RigOptions:
    """Options of a bundle that is opened for measurements.

    Attributes:
        max_batch: slots; the bundle's bound them too.
        num_threads: of a CPU backend; 0: one per physical core that this process may use.
        device: as of ``outrider serve``.
        knows_costs: whether step costs are looked up or measured; else every gamma is fixed.
        costs_folder: where measured step costs are kept; None for the server's folder.
        refreshes_costs: whether step costs are measured even if they are known.
        drafting: settings of the drafters.
        clock: seconds, of requests and of step costs.
        counts_processor: use processor seconds as ``clock``. Other work on the machine then hardly matters, but
            waiting costs nothing and two threads count twice. Step costs are then measured anew and not kept.
    """

    max_batch: int = 8
    num_threads: int = 0
    device: str = "cpu"
    knows_costs: bool = False
    costs_folder: Path | None = None
    refreshes_costs: bool = False
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    clock: Callable[[], float] = time.perf_counter
    counts_processor: bool = False


@dataclass(slots=True)
class Answer:
    """Events of one request.

    Attributes:
        end: None until it ends.
        arrivals: seconds on ``clock``, of each token.
    """

    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    clock: Callable[[], float] = time.perf_counter
    arrivals: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Progressed):
            self.tokens.extend(token.token for token in event.tokens)
            self.arrivals += [self.clock()] * len(event.tokens)
        else:
            self.end = event


@dataclass(slots=True)
class Rig:
    """One open bundle, with timers on engines and sampler.

    Attributes:
        costs: of these engines on this machine, where they are known.
        tenant: of the requests; a new name finds drafters without history.
    """

    bundle: Bundle
    target: TimedEngine
    draft: TimedEngine | None
    sampler: TimedSampler
    tokenizer: TokenizersCodec
    worker: Worker
    device: str = "cpu"
    costs: CostTable | None = None
    clock: Callable[[], float] = time.perf_counter
    next_id: int = 0
    tenant: str = ""

    def engine_s(self) -> float:
        """Return the seconds spent in engine calls so far."""
        return self.target.total_s + (self.draft.total_s if self.draft else 0.0)

    def spec(
        self,
        asked: Prompt | Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams,
        max_tokens: int,
        *,
        seed: int = 0,
        beams: BeamParams | None = None,
    ) -> RequestSpec:
        """Return a request of a new name.

        Of a model with an encoder, answers end with its end token where ``params`` name none: behind it such a model
        has nothing to say. Tokens that it has no place for are not drawn.
        """
        prompt = asked if isinstance(asked, Prompt) else Prompt(tuple(asked))
        manifest = self.bundle.manifest
        if manifest.text2text is not None:
            banned = tuple((token,) for token in manifest.text2text.banned_token_ids)
            params = replace(
                params,
                end_token_ids=params.end_token_ids or manifest.eos_token_ids,
                bad_words=(*params.bad_words, *banned),
            )
        self.next_id += 1
        name = f"bench-{self.next_id}"
        return RequestSpec(
            internal_id=name,
            request_id=name,
            prompt_tokens=prompt.tokens,
            params=params,
            seed=seed,
            max_tokens=max_tokens,
            speculation=speculation,
            tenant=self.tenant,
            beams=beams,
            source_tokens=prompt.source,
            source_is_quotable=prompt.is_quotable,
        )

    def answer(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        params: SamplingParams,
        speculation: SpeculationParams,
        max_tokens: int,
        *,
        first_seed: int = 0,
    ) -> tuple[list[Answer], float]:
        """Run prompts as one batch of arrivals to the end, with seeds ``first_seed``, + 1, ...

        Of a model without an encoder, the token ids of a prompt are enough.

        Returns:
            The answers, in the order of the prompts, and the wall seconds taken.

        Raises:
            RuntimeError: a request failed.
        """
        answers = [Answer(clock=self.clock) for _ in prompts]
        began = self.clock()
        for seed, (asked, answer) in enumerate(zip(prompts, answers, strict=True), first_seed):
            self.worker.submit(self.spec(asked, params, speculation, max_tokens, seed=seed), answer)
        while any(answer.end is None for answer in answers):
            self.worker.run_step()
        wall_s = self.clock() - began
        for answer in answers:
            if isinstance(answer.end, Failed):
                raise RuntimeError("a measured request failed") from answer.end.error
        return answers, wall_s

    def run(self, *asked: Any, **options: Any) -> tuple[list[Finished], float]:
        """Run prompts as ``answer`` does, with its arguments, and return how they ended."""
        answers, wall_s = self.answer(*asked, **options)
        return [one.end for one in answers if isinstance(one.end, Finished)], wall_s

    def close(self) -> None:
        """Close the engines, and give loaded objects back to garbage collection."""
        gc.unfreeze()
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def open_rig(root: Path, options: RigOptions) -> Rig:
    """Open a bundle; its queue has no time limit. Raises as ``runtime.offline.options.opened``."""
    bundle = load_bundle(root)
    manifest = bundle.manifest
    tokenizer = open_codec(bundle)
    options = replace(
        options,
        device=str(choose_device(options.device, bundle).device),
        max_batch=min(options.max_batch, manifest.max_batch),
        clock=time.process_time if options.counts_processor else options.clock,
    )
    config = ServerConfig(
        max_running=options.max_batch,
        queue_timeout_s=math.inf,
        num_threads=options.num_threads,
        drafting=options.drafting,
    )
    costs = _costs(bundle, config, tokenizer, options) if options.knows_costs else None
    target = _open_timed(bundle, "target", options)
    draft = None
    if manifest.draft is not None:
        beside = target.engine if manifest.draft.reads_features else None
        draft = _open_timed(bundle, "draft", options, beside)
    sampler = TimedSampler(_sampler(bundle, options))
    worker = Worker(
        ServedEngines(
            target=target,
            draft=draft,
            sampler=sampler,
            max_gamma=manifest.max_gamma,
            costs=costs,
        ),
        config=config,
        decoder=tokenizer,
        clock=options.clock,
    )
    settle_loaded(waits=True)
    return Rig(
        bundle=bundle,
        target=target,
        draft=draft,
        sampler=sampler,
        tokenizer=tokenizer,
        worker=worker,
        device=options.device,
        costs=costs,
        clock=options.clock,
    )


def _costs(
    bundle: Bundle, config: ServerConfig, tokenizer: TokenizersCodec, options: RigOptions
) -> CostTable:
    with ExitStack() as stack:
        folder = options.costs_folder
        if options.counts_processor:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        serving = ServeOptions(
            costs_folder=folder,
            refreshes_costs=options.refreshes_costs,
            device=options.device,
            config=config,
        )

        @contextmanager
        def engines() -> Iterator[Pair]:
            with closing(open_engines(bundle, serving, options.max_batch)) as pair:
                yield replace(pair, sampler=_sampler(bundle, options))

        return bundle_costs(bundle, serving, engines, tokenizer, options.max_batch, options.clock)


def _sampler(bundle: Bundle, options: RigOptions) -> CpuSampler:
    return CpuSampler(
        max_batch=options.max_batch,
        max_gamma=bundle.manifest.max_gamma,
        vocab_size=bundle.manifest.target.vocab_size,
    )


def _open_timed(
    bundle: Bundle,
    which: Literal["target", "draft"],
    options: RigOptions,
    beside: Engine | None = None,
) -> TimedEngine:
    engine = open_engine(
        bundle,
        which,
        device=options.device,
        num_threads=options.num_threads,
        max_batch=options.max_batch,
        with_trees=any_proposes_trees(),
        beside=beside,
    )
    return TimedEngine(engine)
