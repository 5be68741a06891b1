"""A sampler of two: the host's sampler judges the rows that the device's cannot.

Which of them serves a row depends on that row alone, so no token of it depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.accelerators.device.sampling.sampler import DeviceSampler
from outrider.engines.base import FloatArray
from outrider.engines.sampling.base import Sampler, SamplingRow, Verdict


class MixedSampler:
    """Implements ``engines.sampling.base.Sampler``.

    Args:
        device: serves all rows but those below.
        host: serves the rows whose drafts are judged as whole blocks, rows with masks, and rows whose
            parameters the kernels do not have. A row has masks in both calls or in neither: who draws
            a draft keeps the probabilities that judge it.
    """

    def __init__(self, device: DeviceSampler, host: Sampler) -> None:
        self._device = device
        self._samplers: dict[bool, Sampler] = {False: device, True: host}

    def propose(
        self, logits: FloatArray, rows: Sequence[SamplingRow], *, vocab_size: int
    ) -> list[int]:
        """Draw one draft token per row; see ``Sampler.propose``."""
        tokens: dict[int, int] = {}
        for sampler, places in self._shares(rows):
            share = [rows[place] for place in places]
            drawn = sampler.propose(logits, share, vocab_size=vocab_size)
            tokens |= dict(zip(places, drawn, strict=True))
        return [tokens[place] for place in range(len(rows))]

    def judge(self, logits: FloatArray, rows: Sequence[SamplingRow]) -> list[Verdict]:
        """Judge whole drafts; see ``Sampler.judge``."""
        verdicts: dict[int, Verdict] = {}
        for sampler, places in self._shares(rows):
            found = sampler.judge(logits, [rows[place] for place in places])
            verdicts |= dict(zip(places, found, strict=True))
        return [verdicts[place] for place in range(len(rows))]

    def _shares(self, rows: Sequence[SamplingRow]) -> list[tuple[Sampler, list[int]]]:
        """Each sampler with the places of its rows, if it has any."""
        shares = [
            (sampler, [place for place, row in enumerate(rows) if self._is_hosts(row) is is_hosts])
            for is_hosts, sampler in self._samplers.items()
        ]
        return [(sampler, places) for sampler, places in shares if places]

    def _is_hosts(self, row: SamplingRow) -> bool:
        return row.verifies_block or row.masks is not None or bool(self._device.why_not(row.params))
