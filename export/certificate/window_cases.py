"""Cases of a certificate beyond a sliding window: whether each token sees as many keys as the checkpoint's does.

Windows are thousands of tokens wide; a text as long would cost more than all other cases. So a short prompt is
computed, and its keys and values stand in the cache again and again up to the window (``LongText``). What then comes,
a span across the window's edge and a token, or a small tree, is compared with PyTorch behind the same cache. One row, a
dozen tokens. Where layers keep rings, a span across their last column is compared too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from outrider.engines.base import FloatArray, IntArray
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity_cases import draw_tokens
from outrider.export.certificate.reference import Logits, LogitsOfSequences, LongText
from outrider.export.model_config import ModelConfig

_PROMPT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCase:
    """Tokens [1, n] int64 behind a long text, n at least 2."""

    text: LongText
    tokens: IntArray

    def run(self, runner: GraphRunner) -> FloatArray:
        """Return a graph's logits [1, n, V]: of all tokens but one in a span, then of the last alone."""
        start_behind(runner, self.text, self.tokens.shape[1])
        past = np.array([self.text.past], np.int64)
        span, last = self.tokens[:, :-1], self.tokens[:, -1:]
        found = [runner.extend(span, past), runner.extend(last, past + span.shape[1])]
        return np.concatenate(found, axis=1)

    def expected(self, reference: LogitsOfSequences) -> Logits:
        """Return the reference's logits [1, n, V]."""
        return reference.behind(self.text, self.tokens)


def window_cases(model_config: ModelConfig, max_gamma: int, seed: int) -> dict[str, WindowCase]:
    """Return a verification's span across the edge of a model's window, and across its rings' end, by name."""
    edges = {"window": model_config.window, "ring": model_config.ring_columns}
    cases = {}
    for name, edge in edges.items():
        if edge:
            text = long_text(model_config, seed, edge - 1 - max_gamma // 2)
            count = min(max_gamma + 2, model_config.max_position - text.past)
            cases[name] = WindowCase(text=text, tokens=_draw(model_config, seed, count))
    return cases


def long_text(model_config: ModelConfig, seed: int, past: int) -> LongText:
    """Return a text of so many tokens, one at least."""
    return LongText(prompt=_draw(model_config, seed + 1, _PROMPT), past=max(1, past))


def start_behind(runner: GraphRunner, text: LongText, num_tokens: int) -> None:
    """Fill the cache of one row with a long text; behind it is room for so many tokens, and one column more."""
    capacity = max(text.past, text.prompt.shape[1]) + num_tokens + 1
    runner.forget(batch=1, capacity=capacity)
    runner.extend(text.prompt, np.zeros(1, np.int64))
    runner.repeat(text.prompt.shape[1], text.past)


def _draw(model_config: ModelConfig, seed: int, count: int) -> IntArray:
    return draw_tokens(model_config, np.random.default_rng([seed, count]), (1, count))
