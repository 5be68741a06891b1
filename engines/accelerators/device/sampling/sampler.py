"""The sampler of accelerators: kernels over logits that stay where they are.

The same distributions, modes and noise as ``engines.sampling.cpu_sampler``. Greedy and ``seed_stable`` tokens are the
same from both, unless float32 rounding reverses two that are nearly equal. Where a number draws a
token, the kernels lay the tokens out by id and that sampler lays them out by rank. So the distribution is the
same and the tokens of a seed are not. What reaches the host per step is one tensor of integers per row.

``Sampler``'s two methods hand their answers to the host at once. A ``DeviceRound`` takes the same
steps without: gamma proposals and the judgement follow one another on the device, each reading what
the one before wrote, because all noise and all parameters are known before the first.

Not thread-safe: the thread that owns the engines owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from outrider.engines.accelerators.device.base import PlanDevice
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.kernels.launches import Kernels
from outrider.engines.accelerators.device.sampling.lists import why_not
from outrider.engines.accelerators.device.sampling.round import DeviceRound
from outrider.engines.accelerators.device.sampling.runner import SamplerRunner
from outrider.engines.base import EngineError, FloatArray
from outrider.engines.sampling.base import SamplingParams, SamplingRow, Verdict
from outrider.engines.sampling.noise import CounterNoise, NoiseSource


def why_too_large(vocab_size: int) -> str:
    """Say that a vocabulary is larger than the kernels' sums of integers allow; empty where it is not."""
    if vocab_size <= names.MAX_VOCAB_SIZE:
        return ""
    return f"vocabulary of {vocab_size}: the sampler's kernels take at most {names.MAX_VOCAB_SIZE}"


class DeviceSampler:
    """Implements ``engines.sampling.base.Sampler`` with kernels.

    Args:
        kernels: they; closed with the sampler.
        max_batch: slots, an upper bound of ``SamplingRow.slot``.
        max_gamma: draft tokens of a row at most.
        vocab_size: V of the target.
        device: where they run, together with the engines; stays the caller's.
        noise: where random numbers come from, but those of shared races: kernels draw the words of ``CounterNoise``.

    Raises:
        EngineError: the vocabulary is too large.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        max_batch: int,
        max_gamma: int,
        vocab_size: int,
        device: PlanDevice,
        noise: NoiseSource | None = None,
    ) -> None:
        if reason := why_too_large(vocab_size):
            raise EngineError(reason)
        self._noise: NoiseSource = CounterNoise() if noise is None else noise
        self._runner = SamplerRunner(
            kernels,
            max_batch=max_batch,
            depth=names.kept_depth(max_gamma),
            vocab_size=vocab_size,
            device=device,
        )

    def why_not(self, params: SamplingParams) -> str:
        """Say why rows with these parameters cannot be sampled here; empty where they can."""
        return why_not(params)

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Draw one draft token per row; see ``engines.sampling.base.Sampler``.

        Raises:
            EngineError: ``vocab_size`` is not the sampler's, a draft is longer than ``max_gamma``, or a kernel failed.
        """
        if vocab_size != self._runner.vocab_size:
            known = self._runner.vocab_size
            raise EngineError(f"vocab_size {vocab_size}: the sampler is for {known}")
        tokens: dict[int, int] = {}
        for places, first, group in _groups(rows):
            depths = np.array([len(row.draft_tokens) for row in group])
            step = self._round(group, int(depths.max()) + 1)
            part = logits[first : first + step.num_rows]
            drawn = self._runner.downloads.get([step.propose(np.ascontiguousarray(part), depths)])[
                0
            ]
            for place, row in zip(places, group, strict=True):
                tokens[place] = int(drawn[row.index, 0])
        return [tokens[place] for place in range(len(rows))]

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge whole drafts; see ``engines.sampling.base.Sampler``.

        Raises:
            EngineError: a draft is longer than ``max_gamma``, or a kernel failed.
        """
        verdicts: dict[int, Verdict] = {}
        for places, first, group in _groups(rows):
            gammas = np.array([len(row.draft_tokens) for row in group])
            width = min(logits.shape[1], self._runner.depth)
            step = self._round(group, width - 1)
            part = np.ascontiguousarray(logits[first : first + step.num_rows, :width])
            answers = step.send(step.judge(part, gammas))
            found = [verdict for _, verdict in step.receive(answers, gammas)]
            emitted = [
                (*row.draft_tokens[: verdict.num_accepted], verdict.next_token or 0)
                for row, verdict in zip(group, found, strict=True)
            ]
            complete = step.with_tops(found, part, emitted)
            verdicts.update(zip(places, complete, strict=True))
        return [verdicts[place] for place in range(len(rows))]

    def begin(self, rows: Sequence[SamplingRow], *, gamma: int) -> DeviceRound:
        """A round of which nothing reaches the host before ``DeviceRound.receive``.

        Args:
            rows: row b of every tensor is slot ``first + b``, as engines have it; no drafts yet.
            gamma: draft tokens that will be proposed at most, 0..max_gamma.

        Raises:
            EngineError: rows and slots are not in the same order, or ``gamma`` is too large.
        """
        if len({row.slot - row.index for row in rows}) != 1:
            raise EngineError("rows of a round on the device must lie as their slots do")
        return self._round(rows, gamma)

    def close(self) -> None:
        """Unload the kernels and free the device's memory."""
        self._runner.close()

    def _round(self, rows: Sequence[SamplingRow], gamma: int) -> DeviceRound:
        return DeviceRound(self._runner, self._noise, rows, gamma=gamma)


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
