"""What the metrics learn of one stream: its tokens, its times, what its drafts came to."""

from __future__ import annotations

from collections.abc import Callable

from outrider.runtime.core.params import Finished
from outrider.runtime.serving.metrics import Metrics
from outrider.runtime.serving.outbox import Batch


class StreamCounts:
    """Counts one stream's tokens and times.

    Args:
        metrics: to add to.
        clock: seconds.
        num_samples: completions of the stream. Its request is timed once: from admission to the first token of any of
            them, and to the end of the last; gaps are those of each.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float], num_samples: int = 1) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._num_open = num_samples
        # By index of the completion, when its last tokens were sent.
        self._last_s: dict[int, float] = {}

    def count(self, batch: Batch) -> None:
        """Add a batch that was sent."""
        now_s, last_s = self._clock(), self._last_s
        num_tokens = len(batch.tokens)
        if isinstance(batch.end, Finished) and batch.end.beams:
            num_tokens = batch.end.num_output
            self._metrics.searches.inc()
        if num_tokens:
            self._metrics.output_tokens.inc(num_tokens)
            if not last_s:
                self._metrics.first_token_s.observe(now_s - self._started_s)
            elif batch.index in last_s:
                self._metrics.gap_s.observe(now_s - last_s[batch.index])
            last_s[batch.index] = now_s
        if isinstance(batch.end, Finished):
            self._metrics.count_speculation(batch.end.report)
            self._num_open -= 1
            if self._num_open == 0:
                self._metrics.request_s.observe(now_s - self._started_s)
