"""``outrider analyze``: the tables of Leviathan et al. 2023, measured for a bundle on this machine.

Alpha by drafter and temperature (Table 3) beside plain rejection sampling (A.2) and the bound of any gamma (3.5), c and
v(k), predicted and measured speed-up (Table 4), lenience (Table 5), and traces of when the models ran (Figure 5).
Requests share no history: it would make a second round easier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.engines.base import Engine
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.base import DrafterParts, Guesser
from outrider.runtime.drafters.registry import Drafters, build_drafters
from outrider.runtime.drafters.text.ngrams import UnigramDrafter
from outrider.runtime.gamma.costs import RowKind
from outrider.runtime.offline.alpha import MODEL, Text, measure_alphas, text_of
from outrider.runtime.offline.options import (
    SERVED_ROWS,
    AnalysisOptions,
    chosen_drafters,
    opened,
    seconds_of,
)
from outrider.runtime.offline.prompts import Prompts
from outrider.runtime.offline.results import AlphaRow, Analysis, CostRow, SpeedRow, TraceRow
from outrider.runtime.offline.rig import Rig
from outrider.runtime.offline.speed import (
    PLAIN,
    Expect,
    Measured,
    Report,
    measure_settings,
    say_expected,
)
from outrider.runtime.offline.step_costs import StepCosts
from outrider.runtime.oracle.analysis import optimal_gamma, walltime_factor

TRACE_TOKENS = 24


def analyze(
    bundle: Path, prompts: Path, options: AnalysisOptions, report: Report, expect: Expect
) -> Analysis:
    """Measure a bundle over the prompts of a file (``read_prompts``); raises as ``opened``.

    Args:
        bundle: folder of the bundle.
        prompts: file of them.
        options: of the measurement.
        report: called with a phase, the steps done of it and their number.
        expect: see ``Expect``.
    """
    with opened(bundle, prompts, options) as (rig, encoded, fitted):
        bench = _Bench(rig, encoded, fitted, report)
        bench.say_expected(expect)
        return bench.analysis()


class _Bench:
    """The steps of one analysis over one open bundle."""

    def __init__(
        self, rig: Rig, prompts: Prompts, options: AnalysisOptions, report: Report
    ) -> None:
        self._rig = rig
        self._report = report
        self._prompts = prompts
        self._options = options
        # Alpha counts every position: thresholds below which counts do not draft are off.
        self._all = _drafters(rig, replace(options.drafting(), min_prob=0.0))
        self._names = chosen_drafters(options.drafters, tuple(self._all), self._all.guessers)

    def say_expected(self, expect: Expect) -> None:
        """Say how long it will take."""
        options = self._options
        num_cells = 1 + len(self._names) * len(options.gammas)
        # Texts for alpha are one run more, and judging every position of them about another.
        num_runs = len(options.temperatures) * (2 + options.rounds * num_cells)
        temperature = max(options.temperatures)
        say_expected(self._rig, self._prompts, options, temperature, num_runs, expect)

    def analysis(self) -> Analysis:
        """Measure everything, one temperature after the other."""
        options, rig = self._options, self._rig
        max_gamma = rig.bundle.manifest.max_gamma
        uses_model = {name: self._all.uses_model(name) for name in self._names}
        alphas: list[AlphaRow] = []
        costs: list[CostRow] = []
        speeds: list[SpeedRow] = []
        plain: dict[float, float] = {}
        for temperature in options.temperatures:
            alphas += self._alphas(temperature)
            known = self._costs(temperature)
            costs.append(known.row(temperature, uses_model, range(1, max_gamma + 2)))
            rows, plain[temperature] = self._speeds(known, temperature, alphas)
            speeds += rows
        return Analysis(
            bundle=rig.bundle.root.name,
            folder=str(rig.bundle.root),
            device=rig.device,
            weights=rig.bundle.manifest.target.weights,
            num_prompts=len(self._prompts),
            max_tokens=options.max_tokens,
            batch=options.batch,
            rounds=options.rounds,
            seconds=seconds_of(options.rig.counts_processor),
            alphas=tuple(alphas),
            costs=tuple(costs),
            speeds=tuple(speeds),
            plain_tokens_per_s=plain,
            traces=self._traces(),
            has_head=rig.draft is not None and rig.draft.limits.reads_features > 0,
        )

    def _alphas(self, temperature: float) -> list[AlphaRow]:
        rig, options = self._rig, self._options
        texts: list[Text] = []
        phase = f"texts at temperature {temperature:g}"
        batch = min(len(self._prompts), rig.bundle.manifest.max_batch, SERVED_ROWS)
        for first in range(0, len(self._prompts), batch):
            group = self._prompts[first : first + batch]
            params = SamplingParams(temperature=temperature)
            answers, _ = rig.answer(group, params, PLAIN, options.max_tokens)
            texts += [
                text_of(prompt, answer.tokens, rig.bundle.manifest.eos_token_ids)
                for prompt, answer in zip(group, answers, strict=True)
            ]
            self._report(phase, len(texts), len(self._prompts))
        guessers = {name: one for name in self._names if (one := self._guesser(name)) is not None}
        return measure_alphas(
            rig.target,
            self._engines(),
            guessers,
            texts,
            temperature,
            options.leniences,
            self._report,
        )

    def _engines(self) -> dict[str, Engine]:
        """Return by name what drafters draw from, one token after another."""
        found: dict[str, Engine] = {}
        for name in self._names:
            one = self._all.get(name)
            if name == MODEL and self._rig.draft is not None:
                found[name] = self._rig.draft
            elif isinstance(one, UnigramDrafter):
                found[name] = one.engine
        return found

    def _guesser(self, name: str) -> Guesser | None:
        """Return a drafter whose drafts are functions of the tokens alone; None for any other."""
        one = self._all.get(name)
        return one if isinstance(one, Guesser) and one.capabilities.num_choices == 0 else None

    def _costs(self, temperature: float) -> StepCosts:
        assert self._rig.costs is not None, "the rig was opened to know them"
        longest = max(len(prompt.tokens) for prompt in self._prompts) + self._options.max_tokens
        return StepCosts(
            table=self._rig.costs,
            kind=RowKind.GREEDY if temperature == 0.0 else RowKind.SAMPLED,
            batch=self._options.batch,
            num_cached=longest,
        )

    def _speeds(
        self, costs: StepCosts, temperature: float, alphas: Sequence[AlphaRow]
    ) -> tuple[list[SpeedRow], float]:
        settings = [
            SpeculationParams(drafter=name, gamma=gamma)
            for name in self._names
            for gamma in self._options.gammas
        ]
        plain, measured = measure_settings(
            self._rig,
            self._prompts,
            settings,
            self._options,
            temperature=temperature,
            phase=f"speed at temperature {temperature:g}",
            report=self._report,
        )
        known = {row.drafter: row.alpha for row in alphas if row.temperature == temperature}
        rows = []
        for setting, one in zip(settings, measured, strict=True):
            alpha = known.get(setting.drafter or "", one.alpha_hat)
            rows.append(self._speed_row(costs, temperature, setting, alpha, one, plain))
        return rows, plain.tokens_per_s

    def _speed_row(
        self,
        costs: StepCosts,
        temperature: float,
        setting: SpeculationParams,
        alpha: float | None,
        measured: Measured,
        plain: Measured,
    ) -> SpeedRow:
        """Return one line of Table 4: the formula beside the measurement."""
        drafter, gamma = setting.drafter or "", setting.gamma or 0
        c, v = costs.c(uses_model=self._all.uses_model(drafter)), costs.v(gamma + 1)
        paper = predicted = best = None
        if alpha is not None:
            max_gamma = self._rig.bundle.manifest.max_gamma
            paper = walltime_factor(alpha, gamma, c)
            predicted = walltime_factor(alpha, gamma, c, verify_cost=v)
            best, _ = optimal_gamma(alpha, c, max_gamma=max_gamma, verify_cost=costs.v)
        return SpeedRow(
            drafter=drafter,
            temperature=temperature,
            gamma=gamma,
            alpha=alpha,
            draft_cost=c,
            verify_cost=v,
            paper=paper,
            predicted=predicted,
            best_gamma=best,
            alpha_hat=measured.alpha_hat,
            tokens_per_step=measured.tokens_per_step,
            operations=measured.operations,
            tokens_per_s=measured.tokens_per_s,
            speedup=measured.over(plain),
            interval=measured.interval_over(plain),
            alpha_by_place=measured.alpha_by_place,
        )

    def _traces(self) -> tuple[TraceRow, ...]:
        """Record one greedy request with the widest drafts, with half as wide ones, and without."""
        drafter = MODEL if MODEL in self._names else self._names[0]
        widest = max(self._options.gammas)
        gammas = dict.fromkeys((widest, max(1, widest // 2), 0))
        return tuple(self._trace(drafter, gamma) for gamma in gammas)

    def _trace(self, drafter: str, gamma: int) -> TraceRow:
        rig = self._rig
        timed = [rig.target, *([rig.draft] if rig.draft is not None else [])]
        for engine in timed:
            engine.calls = []
        wanted = SpeculationParams(drafter=drafter, gamma=gamma) if gamma else PLAIN
        length = min(TRACE_TOKENS, self._options.max_tokens)
        rig.run(self._prompts[:1], SamplingParams(temperature=0.0), wanted, length)
        calls = [tuple(engine.calls or ()) for engine in timed]
        for engine in timed:
            engine.calls = None
        origin = min(began for one in calls for began, _ in one)
        shifted = [tuple((1e3 * (a - origin), 1e3 * (b - origin)) for a, b in one) for one in calls]
        label = f"{drafter}, gamma {gamma}" if gamma else "plain decoding"
        drafts = shifted[1] if len(shifted) > 1 else ()
        return TraceRow(label=label, gamma=gamma, target_ms=shifted[0], draft_ms=drafts)


def _drafters(rig: Rig, config: DraftingConfig) -> Drafters:
    manifest = rig.bundle.manifest
    return build_drafters(
        DrafterParts(
            draft=rig.draft,
            sampler=rig.sampler,
            vocab_size=manifest.target.vocab_size,
            chunk=manifest.max_extend,
            max_gamma=manifest.max_gamma,
            config=config,
        )
    )
