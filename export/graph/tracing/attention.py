"""Attention over caches as custom operators, which run in PyTorch and become ONNX Attention.

Sinks: a number per head stands beside the scores of each token in its softmax, and weighs no value. Attention answers
without it. What it takes of the weights is a factor of the answer:

    sum(exp(scores - most)) / (sum(exp(scores - most)) + exp(sink - most)),    most = max(scores)

The sum is a product with ones, two columns of them: such a product has the bits of each row in every batch and at every
capacity, as the product with values has. (ONNX Runtime 1.31.1, measured at capacities of 256 to 2,048: with one column
the bits depend on the capacity.)

Source: ONNX operator Attention-24; sinks of gpt-oss, OpenAI 2025 (arXiv:2508.10925), 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.onnx_opset import opset24
from torch import Tensor

# Of Attention's fourth output: scores as the softmax gets them.
_MASKED_SCORES = 2
# Of the ones that a sum of weights is a product with.
SUM_COLUMNS = 2


@torch.library.custom_op("outrider::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> Tensor:
    """Return grouped-query attention [B, Hq, T, Dv] over each row's keys, causal from the row's end or over all.

    Args:
        query: [B, Hq, T, D]; where causal, its last token is token ``lengths[b] - 1`` of row b.
        key: [B, H, S, D], valid up to ``lengths[b]``.
        value: [B, H, S, Dv].
        bias: [1 or B, Hq, T, S], added to the scaled scores; None for none.
        lengths: [B] int64.
        scale: factor on the scores.
        softcap: c of c * tanh(score / c); 0 is off.
        is_causal: whether a token sees no later ones.
    """
    scores = masked_scores(query, key, bias, lengths, scale, softcap, is_causal)
    return scores.softmax(dim=-1) @ _repeated(value, query)


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> Tensor:
    return query.new_empty(query.shape[:3] + value.shape[3:])


@torch.library.custom_op("outrider::attend_scored", mutates_args=())
def attend_scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return what ``attend`` does, and its scores [B, Hq, T, S] behind all masks."""
    scores = masked_scores(query, key, bias, lengths, scale, softcap, is_causal)
    return scores.softmax(dim=-1) @ _repeated(value, query), scores


@attend_scored.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    rows = query.shape[:3]
    return query.new_empty(rows + value.shape[3:]), query.new_empty((*rows, key.shape[2]))


def masked_scores(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> Tensor:
    """Return scores [B, Hq, T, S], minus infinity where a token does not see a key; arguments as of ``attend``."""
    scores = (query @ _repeated(key, query).transpose(2, 3)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    num_tokens, capacity = query.shape[2], key.shape[2]
    last = lengths[:, None].expand(-1, num_tokens) - 1
    if is_causal:
        last = last - num_tokens + 1 + torch.arange(num_tokens, device=query.device)
    is_seen = torch.arange(capacity, device=query.device) <= last[:, :, None]
    return scores.masked_fill(~is_seen[:, None], float("-inf"))


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """Return heads of a cache [B, H, S, D] as often as queries [B, Hq, T, D] share them."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def beside_sinks(answers: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the answers of attention whose softmax has a sink per head.

    Args:
        answers: [B, H, T, D], without sinks.
        scores: [B, H, T, S], as the softmax gets them: minus infinity, or nearly so, where a key is not seen.
        sinks: [H].
    """
    most = scores.amax(-1, keepdim=True)
    ones = scores.new_ones(scores.shape[-1], SUM_COLUMNS)
    total = ((scores - most).exp() @ ones)[..., :1]
    return answers * (total / (total + (sinks.reshape(1, -1, 1, 1) - most).exp()))


# As Any: the types of these functions know tensors, and what is traced here is none.
_ONNX: Any = opset24


def _onnx_attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    lengths: Any,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> Any:
    given = query, key, value, bias, None, None, lengths
    output, _, _, _ = _ONNX.Attention(
        *given, is_causal=int(is_causal), scale=scale, softcap=softcap
    )
    return output


def _onnx_attend_scored(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    lengths: Any,
    scale: float,
    softcap: float,
    is_causal: bool,
) -> Any:
    given = query, key, value, bias, None, None, lengths
    output, _, _, scores = _ONNX.Attention(
        *given,
        is_causal=int(is_causal),
        scale=scale,
        softcap=softcap,
        qk_matmul_output_mode=_MASKED_SCORES,
    )
    return output, scores


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of each custom operator, for ``torch.onnx.export``."""
    return {
        torch.ops.outrider.attend.default: _onnx_attend,
        torch.ops.outrider.attend_scored.default: _onnx_attend_scored,
    }
