"""What a target computes of texts, kept for a head to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from outrider.export.graph.tracing.taps import Taps
from outrider.export.progress import Steps, untold
from torch import Tensor, nn
from transformers import PreTrainedModel

BEST = 64
"""Tokens of the target's distribution that are learnt from; the others count as never proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A prompt with the target's answer.

    Attributes:
        tokens: of both.
        num_prompt: of them.
        is_greedy: whether the answer is.
        is_held_out: whether it is to be judged by, and not learnt from.
    """

    tokens: Sequence[int]
    num_prompt: int
    is_greedy: bool
    is_held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A lesson as the target read it.

    Attributes:
        lesson: the same.
        tokens: [n] int64.
        streams: [n, taps * hidden] float16, what enters the tapped layers.
        best: [n, BEST] int64, the likeliest tokens behind each, likeliest first.
        probs: [n, BEST] float32, of these.
    """

    lesson: Lesson
    tokens: Tensor
    streams: Tensor
    best: Tensor
    probs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Texts side by side, padded at their ends.

    Attributes:
        streams: [B, n, taps * hidden] float16.
        tokens: [B, n] int64.
        best: [B, n - 1, BEST] int64, of row t behind token t + 1.
        probs: likewise, float32.
        is_answer: [B, n - 1] bool, whether the answer has the token behind token t + 1.
        is_greedy: [B] bool.
    """

    streams: Tensor
    tokens: Tensor
    best: Tensor
    probs: Tensor
    is_answer: Tensor
    is_greedy: Tensor


def read_lessons(
    model: PreTrainedModel,
    taps: Sequence[int],
    lessons: Sequence[Lesson],
    report: Steps = untold,
) -> list[Text]:
    """Return what a target computes of texts. ``report`` is called with the texts read and their number."""
    seen = Taps(taps, nn.Identity(), 2)
    found = []
    with torch.no_grad(), seen.inside(model):
        for number, lesson in enumerate(lessons, 1):
            tokens = torch.tensor(lesson.tokens)
            logits = model(tokens[None], use_cache=False).logits[0].float()
            best = logits.topk(min(BEST, logits.shape[-1]))
            probs = torch.exp(best.values - logits.logsumexp(-1, keepdim=True))
            streams = seen.features()[0].half()
            found.append(
                Text(lesson=lesson, tokens=tokens, streams=streams, best=best.indices, probs=probs)
            )
            report(number, len(lessons))
    return found


def batch_of(texts: Sequence[Text]) -> Batch:
    """Return texts as one batch."""
    longest = max(len(text.tokens) for text in texts)

    def padded(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(
            [
                nn.functional.pad(one, (0,) * (2 * one.ndim - 1) + (longest - len(one),))
                for one in values
            ]
        )

    behind = torch.arange(longest - 1)[None] + 2
    starts = torch.tensor([[text.lesson.num_prompt] for text in texts])
    ends = torch.tensor([[len(text.tokens)] for text in texts])
    return Batch(
        streams=padded([text.streams for text in texts]),
        tokens=padded([text.tokens for text in texts]),
        best=padded([text.best for text in texts])[:, 1:],
        probs=padded([text.probs for text in texts])[:, 1:],
        is_answer=(behind > starts) & (behind < ends),
        is_greedy=torch.tensor([text.lesson.is_greedy for text in texts]),
    )


def frequent_ids(texts: Sequence[Text], vocab_size: int, num_ids: int) -> Tensor:
    """Return the ids [num_ids] int64, ascending, that are most often among the target's four likeliest in answers.

    Texts that are held out do not count.
    """
    likely = [
        one.best[one.lesson.num_prompt - 1 :, :4].flatten()
        for one in texts
        if not one.lesson.is_held_out
    ]
    counts = torch.bincount(torch.cat(likely), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num_ids].sort().values
