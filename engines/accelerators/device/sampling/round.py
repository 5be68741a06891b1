"""A round of the device sampler, from its first draft to its verdicts without a value on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from outrider.engines.accelerators.device.base import DeviceTensor
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.answers import Tops, add_tops, read_answer
from outrider.engines.accelerators.device.sampling.rows import (
    Feeds,
    Shape,
    describe,
    describe_judgement,
    describe_proposal,
    race_addresses,
)
from outrider.engines.accelerators.device.sampling.runner import SamplerRunner
from outrider.engines.accelerators.device.sampling.tensors import Stage
from outrider.engines.accelerators.device.transfers import HostArray, PendingDownload
from outrider.engines.base import EngineError, FloatArray, IntArray
from outrider.engines.sampling.base import SamplingRow, Verdict
from outrider.engines.sampling.noise import NoiseSource

Logits: TypeAlias = FloatArray | DeviceTensor


class DeviceRound:
    """Proposals and the judgement of one round, chained on the device; see ``DeviceSampler.begin``.

    Args:
        rows: those to serve; row b of every tensor is slot ``rows[0].slot - rows[0].index + b``.
        gamma: positions, less one.

    Raises:
        EngineError: more draft tokens than probabilities can be kept for.
    """

    def __init__(
        self,
        runner: SamplerRunner,
        noise: NoiseSource,
        rows: Sequence[SamplingRow],
        *,
        gamma: int,
    ) -> None:
        longest = max(gamma, *(len(row.draft_tokens) for row in rows))
        if longest > gamma or longest >= runner.depth:
            raise EngineError(f"{longest} draft tokens: at most {min(gamma, runner.depth - 1)}")
        self.num_rows = 1 + max(row.index for row in rows)
        self._runner, self._noise, self._rows = runner, noise, rows
        self._shape = Shape(
            num_rows=self.num_rows,
            num_positions=gamma + 1,
            depth=runner.depth,
            vocab_size=runner.vocab_size,
        )
        self._feeds = describe(rows, self._shape)
        self._draft_tokens: HostArray | DeviceTensor = self._feeds[names.DRAFT_TOKENS]
        self._prepared: list[Mapping[str, DeviceTensor]] = []

    def prepare(self, proposals: Sequence[IntArray], gammas: IntArray) -> None:
        """Upload in one piece what all calls to come read from the host, instead of a piece with each.

        Args:
            proposals: ``depths`` of each call of ``propose``, in their order.
            gammas: of the call of ``judge``.
        """
        calls = [*map(self._proposal, proposals), self._judgement(gammas)]
        # What calls share, such as lists, is one array.
        placed = self._runner.upload({str(id(a)): a for feeds in calls for a in feeds.values()})
        self._prepared = [
            {name: placed[str(id(array))] for name, array in feeds.items()} for feeds in calls
        ]

    def propose(self, logits: Logits, depths: IntArray) -> DeviceTensor:
        """Draw one draft token per row; the next call and ``judge`` see it.

        Args:
            logits: [B, any, V of the draft] float32; column 0 of each row is used.
            depths: [len(rows)] int64, draft tokens of each row before this one.

        Returns:
            [B, 1] int64 on the device: what the draft model is fed next.
        """
        feeds = self._prepared.pop(0) if self._prepared else self._proposal(depths)
        outputs = self._run(Stage.PROPOSE, logits, feeds)
        self._draft_tokens = outputs[names.NEW_DRAFT_TOKENS]
        return outputs[names.NEXT_TOKENS]

    def judge(self, logits: Logits, gammas: IntArray) -> DeviceTensor:
        """Judge what was drafted.

        Args:
            logits: [B, R, V] float32 of the target, R = gamma + 1.
            gammas: [len(rows)] int64, draft tokens of each row.

        Returns:
            [B, 4 + R] int64 on the device; see ``receive``.
        """
        feeds = self._prepared.pop(0) if self._prepared else self._judgement(gammas)
        outputs = self._run(Stage.JUDGE, logits, feeds)
        return outputs[names.ANSWERS]

    def send(self, answers: DeviceTensor) -> PendingDownload:
        """Send the answers of ``judge`` to the host, and the drafted tokens in the same copy."""
        drafted = self._draft_tokens
        sent = [answers] if isinstance(drafted, np.ndarray) else [answers, drafted]
        return self._runner.downloads.send(sent)

    def receive(
        self, coming: PendingDownload, gammas: IntArray
    ) -> list[tuple[tuple[int, ...], Verdict]]:
        """Return each row's draft and verdict, once they are there: a round's one synchronisation."""
        drafted = self._draft_tokens
        arrays = coming.arrays()
        found, tokens = (*arrays, drafted) if isinstance(drafted, np.ndarray) else arrays
        return [
            (
                tuple(tokens[row.index, :gamma].tolist()),
                read_answer(row, found[row.index].tolist(), gamma),
            )
            for row, gamma in zip(self._rows, gammas.tolist(), strict=True)
        ]

    @property
    def draft_tokens(self) -> DeviceTensor | None:
        """[B, R] int64 on the device, what was drafted so far; None before the first proposal."""
        return None if isinstance(self._draft_tokens, np.ndarray) else self._draft_tokens

    def with_tops(
        self, verdicts: Sequence[Verdict], logits: Logits, emitted: Sequence[tuple[int, ...]]
    ) -> list[Verdict]:
        """Verdicts with what rows ask for of the raw logits: log-probabilities and choices.

        Raises:
            EngineError: a row asks for more entries than the kernel finds.
        """
        if all(row.num_logprobs is None and row.num_choices == 0 for row in self._rows):
            return list(verdicts)
        tokens = np.zeros((self.num_rows, self._shape.num_positions), dtype=np.int64)
        for row, run in zip(self._rows, emitted, strict=True):
            tokens[row.index, : len(run)] = run
        feeds = {names.LOGITS: logits, names.EMITTED: tokens}
        outputs = self._runner.run(Stage.TOPS, feeds, slot=0, num_rows=self.num_rows)
        logprobs, ids, top_logprobs = self._runner.downloads.get(
            [outputs[name] for name in (names.LOGPROBS, names.TOP_IDS, names.TOP_LOGPROBS)]
        )
        tops = Tops(logprobs=logprobs, ids=ids, top_logprobs=top_logprobs)
        return [
            add_tops(verdict, row, tops) for row, verdict in zip(self._rows, verdicts, strict=True)
        ]

    def _proposal(self, depths: IntArray) -> Feeds:
        """What a proposal reads from the host."""
        feeds = describe_proposal(self._feeds, self._rows, self._shape, self._noise, depths)
        spans = [range(depth, depth + 1) for depth in depths.tolist()]
        return feeds | race_addresses(self._rows, self._shape, spans, 1)

    def _judgement(self, gammas: IntArray) -> Feeds:
        """What the judgement reads from the host."""
        feeds = describe_judgement(self._feeds, self._rows, self._shape, self._noise, gammas)
        spans = [range(gamma + 1) for gamma in gammas.tolist()]
        width = self._shape.num_positions
        return feeds | race_addresses(self._rows, self._shape, spans, width)

    def _run(
        self, stage: Stage, logits: Logits, feeds: Mapping[str, HostArray | DeviceTensor]
    ) -> dict[str, DeviceTensor]:
        """Run a stage on logits."""
        given = {**feeds, names.LOGITS: logits}
        if not isinstance(self._draft_tokens, np.ndarray):
            given[names.DRAFT_TOKENS] = self._draft_tokens
        slot = self._rows[0].slot - self._rows[0].index
        return self._runner.run(stage, given, slot=slot, num_rows=self.num_rows)
