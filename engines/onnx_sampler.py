"""The sampler of accelerators: ONNX graphs over logits that stay where they are.

The same laws, modes and noise as ``engines.cpu_sampler``. Greedy and ``seed_stable`` tokens are the
same from both, unless float32 rounding reverses two that are nearly equal. Where a number draws a
token, the graphs lay the tokens out by id and that sampler by rank, so the law is the same and the
tokens of a seed are not. What reaches the host per step is one tensor of integers per row.

``Sampler``'s two methods hand their answers to the host at once. A ``DeviceRound`` takes the same
steps without: gamma proposals and the judgement follow one another on the device, each reading what
the one before wrote, because all noise and all parameters are known before the first.

Not thread-safe: the thread that owns the engines owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from engines import sampler_tensors as names
from engines.base import EngineError, FloatArray, IntArray
from engines.laws import SamplingRow, Verdict
from engines.noise import CounterNoise, NoiseSource
from engines.sampler_answers import Tops, add_tops, read_answer
from engines.sampler_rows import (
    Feeds,
    Shape,
    describe,
    describe_judgement,
    describe_proposal,
    race_addresses,
    races,
    variant_for,
)
from engines.sampler_runner import DeviceValue, SamplerRunner
from engines.sampler_tensors import Variant

Logits: TypeAlias = FloatArray | DeviceValue


class OnnxSampler:
    """Implements ``engines.laws.Sampler`` with the graphs of ``export.sampler_graphs``.

    Args:
        folder: the graphs, for example ``sampler`` of a bundle.
        max_batch: slots, an upper bound of ``SamplingRow.slot``.
        max_gamma: draft tokens of a row at most; the one the graphs were made for.
        vocab_size: V of the target, likewise.
        device: "cpu" or "cuda".
        num_threads: of the pool that all sessions of the process share.
        noise: where random numbers come from.
        draws_races: whether the noise of shared races, V numbers per position, is drawn by a graph
            instead of ``noise``, whose words it has to the bit, and is never uploaded. None: except
            on "cpu", where the graph takes 385 ms at V = 151,936 and numpy 0.4.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int,
        max_gamma: int,
        vocab_size: int,
        device: str = "cpu",
        num_threads: int = 2,
        noise: NoiseSource | None = None,
        draws_races: bool | None = None,
    ) -> None:
        self._noise: NoiseSource = CounterNoise() if noise is None else noise
        self._runner = SamplerRunner(
            folder,
            max_batch=max_batch,
            depth=names.kept_depth(max_gamma),
            vocab_size=vocab_size,
            device=device,
            num_threads=num_threads,
        )
        self._draws_races = device != "cpu" if draws_races is None else draws_races

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Draw one draft token per row; see ``engines.laws.Sampler``.

        Raises:
            EngineError: ``vocab_size`` is not the one of the graphs, a draft is longer than
                ``max_gamma``, or a graph failed.
        """
        if vocab_size != self._runner.vocab_size:
            known = self._runner.vocab_size
            raise EngineError(f"vocab_size {vocab_size}: the sampler's graphs are for {known}")
        tokens: dict[int, int] = {}
        for places, first, group in _groups(rows):
            depths = np.array([len(row.draft_tokens) for row in group])
            step = self._round(group, int(depths.max()) + 1)
            part = logits[first : first + step.num_rows]
            drawn = step.propose(np.ascontiguousarray(part), depths).numpy()
            for place, row in zip(places, group, strict=True):
                tokens[place] = int(drawn[row.index, 0])
        return [tokens[place] for place in range(len(rows))]

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge whole drafts; see ``engines.laws.Sampler``.

        Raises:
            EngineError: a draft is longer than ``max_gamma``, or a graph failed.
        """
        verdicts: dict[int, Verdict] = {}
        for places, first, group in _groups(rows):
            gammas = np.array([len(row.draft_tokens) for row in group])
            width = min(logits.shape[1], self._runner.depth)
            step = self._round(group, width - 1)
            part = np.ascontiguousarray(logits[first : first + step.num_rows, :width])
            found = step.verdicts(step.judge(part, gammas), gammas)
            emitted = [
                (*row.draft_tokens[: verdict.num_accepted], verdict.next_token or 0)
                for row, verdict in zip(group, found, strict=True)
            ]
            complete = step.with_tops(found, part, emitted)
            verdicts.update(zip(places, complete, strict=True))
        return [verdicts[place] for place in range(len(rows))]

    def begin(self, rows: Sequence[SamplingRow], *, gamma: int) -> DeviceRound:
        """A round of which nothing reaches the host before ``DeviceRound.verdicts``.

        Args:
            rows: row b of every tensor is slot ``first + b``, as engines have it; no drafts yet.
            gamma: draft tokens that will be proposed at most, 0..max_gamma.

        Raises:
            EngineError: rows and slots do not lie alike, or ``gamma`` is too large.
        """
        if len({row.slot - row.index for row in rows}) != 1:
            raise EngineError("rows of a round on the device must lie as their slots do")
        return self._round(rows, gamma)

    def _round(self, rows: Sequence[SamplingRow], gamma: int) -> DeviceRound:
        noise = None if self._draws_races else self._noise
        return DeviceRound(self._runner, self._noise, rows, gamma=gamma, race_noise=noise)


class DeviceRound:
    """Proposals and the judgement of one round, chained on the device; see ``OnnxSampler.begin``.

    Args:
        rows: those to serve; row b of every tensor is slot ``rows[0].slot - rows[0].index + b``.
        gamma: positions, less one.
        race_noise: where shared exponentials come from; None for the graph that draws them.

    Raises:
        EngineError: more draft tokens than laws can be kept for.
    """

    def __init__(
        self,
        runner: SamplerRunner,
        noise: NoiseSource,
        rows: Sequence[SamplingRow],
        *,
        gamma: int,
        race_noise: NoiseSource | None,
    ) -> None:
        longest = max(gamma, *(len(row.draft_tokens) for row in rows))
        if longest > gamma or longest >= runner.depth:
            raise EngineError(f"{longest} draft tokens: at most {min(gamma, runner.depth - 1)}")
        self.num_rows = 1 + max(row.index for row in rows)
        self._runner, self._noise, self._rows = runner, noise, rows
        self._race_noise = race_noise
        self._shape = Shape(
            num_rows=self.num_rows,
            num_positions=gamma + 1,
            depth=runner.depth,
            vocab_size=runner.vocab_size,
        )
        self._variant = variant_for(rows, vocab_size=runner.vocab_size)
        self._feeds = describe(rows, self._shape, self._variant)
        self._draft_tokens: IntArray | DeviceValue = self._feeds[names.DRAFT_TOKENS]

    def propose(self, logits: Logits, depths: IntArray) -> DeviceValue:
        """Draw one draft token per row; the next call and ``judge`` see it.

        Args:
            logits: [B, any, V of the draft] float32; column 0 of each row is used.
            depths: [len(rows)] int64, draft tokens of each row before this one.

        Returns:
            [B, 1] int64 on the device: what the draft model is fed next.
        """
        feeds = describe_proposal(self._feeds, self._rows, self._shape, self._noise, depths)
        spans = [range(depth, depth + 1) for depth in depths.tolist()]
        outputs = self._run(names.propose_file(self._variant), logits, feeds, spans)
        self._draft_tokens = outputs[names.NEW_DRAFT_TOKENS]
        return outputs[names.NEXT_TOKENS]

    def judge(self, logits: Logits, gammas: IntArray) -> DeviceValue:
        """Judge what was drafted.

        Args:
            logits: [B, R, V] float32 of the target, R = gamma + 1.
            gammas: [len(rows)] int64, draft tokens of each row.

        Returns:
            [B, 4 + R] int64 on the device; see ``verdicts``.
        """
        feeds = describe_judgement(self._feeds, self._rows, self._shape, self._noise, gammas)
        spans = [range(gamma + 1) for gamma in gammas.tolist()]
        outputs = self._run(names.judge_file(self._variant), logits, feeds, spans)
        return outputs[names.ANSWERS]

    def verdicts(self, answers: DeviceValue, gammas: IntArray) -> list[Verdict]:
        """What ``judge`` answered, copied to the host: a round's one synchronisation."""
        found = answers.numpy()
        return [
            read_answer(row, found[row.index].tolist(), gamma)
            for row, gamma in zip(self._rows, gammas.tolist(), strict=True)
        ]

    def with_tops(
        self, verdicts: Sequence[Verdict], logits: Logits, emitted: Sequence[tuple[int, ...]]
    ) -> list[Verdict]:
        """Verdicts with what rows ask for of the raw logits: log-probabilities and choices.

        Raises:
            EngineError: a row asks for more entries than the graph finds.
        """
        if all(row.num_logprobs is None and row.num_choices == 0 for row in self._rows):
            return list(verdicts)
        tokens = np.zeros((self.num_rows, self._shape.num_positions), dtype=np.int64)
        for row, run in zip(self._rows, emitted, strict=True):
            tokens[row.index, : len(run)] = run
        feeds = {names.LOGITS: logits, names.EMITTED: tokens}
        outputs = self._runner.run(names.LOGPROBS_FILE, feeds, slot=0, num_rows=self.num_rows)
        tops = Tops(
            logprobs=outputs[names.LOGPROBS].numpy(),
            ids=outputs[names.TOP_IDS].numpy(),
            top_logprobs=outputs[names.TOP_LOGPROBS].numpy(),
        )
        return [
            add_tops(verdict, row, tops) for row, verdict in zip(self._rows, verdicts, strict=True)
        ]

    def _run(
        self, file: str, logits: Logits, feeds: Feeds, spans: Sequence[range]
    ) -> dict[str, DeviceValue]:
        """Run a graph on logits; ``spans`` are the depths at which each row may race."""
        given = {**feeds, names.LOGITS: logits, names.DRAFT_TOKENS: self._draft_tokens}
        if self._variant is Variant.RACE:
            is_judging = file == names.judge_file(self._variant)
            width = self._shape.num_positions if is_judging else 1
            given[names.RACES] = self._races(spans, width)
        slot = self._rows[0].slot - self._rows[0].index
        return self._runner.run(file, given, slot=slot, num_rows=self.num_rows)

    def _races(self, spans: Sequence[range], width: int) -> Logits:
        """[B, width, V] float32, from the host or drawn on the device."""
        if self._race_noise is not None:
            return races(self._rows, self._shape, self._race_noise, spans, width)
        addresses = race_addresses(self._rows, self._shape, spans, width)
        outputs = self._runner.run(names.NOISE_FILE, addresses, slot=0, num_rows=self.num_rows)
        return outputs[names.RACES]


def _groups(
    rows: Sequence[SamplingRow],
) -> Iterator[tuple[list[int], int, list[SamplingRow]]]:
    """Rows that lie as their slots do: their places in ``rows``, the index of the first, and they.

    The first becomes row 0 of its group.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.slot - row.index, []).append(place)
    for places in groups.values():
        first = min(rows[place].index for place in places)
        yield (
            places,
            first,
            [replace(rows[place], index=rows[place].index - first) for place in places],
        )
