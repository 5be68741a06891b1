"""A head as PyTorch modules: what of it runs in the target's graph, and what in its own.

The layer is that of Transformers, its queries, keys and values widened to read a token's embedding and its feature one
behind the other, so it is traced as any model's (``graph.tracing.kv_export``).

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.1; ``cnets.py`` of its authors.
"""

from __future__ import annotations

from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.heads.checkpoint import EMBEDDING, LAYER, HeadCheckpoint
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

NEVER = -1e30
"""Logit of a target id that a head has no id for: finite, and no chance beside any other."""
_DECODER_LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
# Of what is a module of its own, and read elsewhere.
_INLET = ("fc.", "input_norm.", "fc_norm.")


class Inlet(nn.Module):
    """The target's side of a head: its taps, [B, T, taps * hidden], made features [B, T, F]."""

    def __init__(self, head: HeadCheckpoint) -> None:
        super().__init__()
        size, count, eps = head.target_hidden_size, head.num_taps, head.config.rms_norm_eps
        self.fc = nn.Linear(count * size, head.config.hidden_size, bias=False)
        self.input_norm = LlamaRMSNorm(count * size, eps) if head.norm_before_fc else None
        norms = [LlamaRMSNorm(size, eps) for _ in range(count)] if head.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self._count = count

    def forward(self, streams: Tensor) -> Tensor:
        """Return features [B, T, F] float32 of streams [B, T, taps * hidden] float32."""
        if self.input_norm is not None:
            streams = self.input_norm(streams)
        if self.fc_norm:
            each = zip(self.fc_norm, streams.chunk(self._count, dim=-1), strict=True)
            streams = torch.cat([norm(stream) for norm, stream in each], dim=-1)
        projected: Tensor = self.fc(streams)
        return projected


class MappedLogits(nn.Module):
    """A projection to V_draft ids whose logits stand at the target's ids; ``NEVER`` at all others."""

    def __init__(
        self, hidden_size: int, num_ids: int, target_ids: Tensor | None, size: int
    ) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden_size, num_ids, bias=False)
        # Of each target id the draft's; V_draft, a column of NEVER, for those without.
        places = None
        if target_ids is not None:
            places = torch.full((size,), num_ids).scatter(0, target_ids, torch.arange(num_ids))
        self.register_buffer("places", places, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The projection's own."""
        return self.projection.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [B, R, V] float32 of hidden states [B, R, h] float32."""
        logits: Tensor = self.projection(hidden)
        if self.places is None:
            return logits
        never = torch.full_like(logits[..., :1], NEVER)
        return torch.cat([logits, never], dim=-1).index_select(-1, self.places)


class Head(PreTrainedModel):
    """The head's own side.

    Attributes:
        features: [B, T, F] float32, set before a call: of the token before each.
        recycled: [B, T, F] float32, set by a call: for the token behind each.
    """

    config_class = None
    _supports_attention_backend = True
    # Which is causal without a mask; what is registered for eager attention is not.
    _supports_sdpa = True

    def __init__(self, head: HeadCheckpoint, vocab_size: int) -> None:
        config = head.config
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layer = _DECODER_LAYERS[config.model_type](config, 0)
        self.layer.hidden_norm = LlamaRMSNorm(hidden_size, eps)
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(attention, name)
            wide = nn.Linear(2 * hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(attention, name, wide)
        self.norm = LlamaRMSNorm(hidden_size, eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = MappedLogits(hidden_size, config.vocab_size, head.target_ids, vocab_size)
        self._norm_before_residual = head.norm_before_residual
        self._norm_output = head.norm_output
        self.features: Tensor | None = None
        self.recycled: Tensor | None = None

    def get_output_embeddings(self) -> nn.Module:
        """Return the projection to logits, which ``set_output_embeddings`` replaces."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the projection to logits."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> CausalLMOutput:
        """Return logits behind tokens [B, T] int64, each beside its feature."""
        assert self.features is not None
        layer, features = self.layer, self.features
        normed = layer.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        embedded = layer.input_layernorm(self.embed_tokens(input_ids))
        attended, _ = layer.self_attn(
            torch.cat([embedded, normed], dim=-1),
            position_embeddings=self.rotary_emb(features, position_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        hidden = residual + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        output = self.norm(hidden)
        self.recycled = output if self._norm_output else hidden
        return CausalLMOutput(logits=self.lm_head(output))


def build(head: HeadCheckpoint, vocab_size: int, embedding: Tensor) -> tuple[Inlet, Head]:
    """Return both sides of a head for a target of ``vocab_size`` tokens, in evaluation mode.

    ``embedding`` [V, hidden] is the target's, for a head that has none of its own.

    Raises:
        BundleError: a tensor is missing, of another shape, or one that is not read; or its ids are not the target's.
    """
    ids = head.target_ids
    if ids is None and head.config.vocab_size != vocab_size:
        raise BundleError(
            f"{head.name}: it has {head.config.vocab_size} ids and no d2t, the target {vocab_size}"
        )
    if ids is not None and int(ids.max()) >= vocab_size:
        raise BundleError(f"{head.name}: d2t maps to {int(ids.max())}, the target has {vocab_size}")
    tensors = dict(head.tensors)
    if EMBEDDING not in tensors:
        if embedding.shape[1] != head.config.hidden_size:
            raise BundleError(
                f"{head.name}: it has no {EMBEDDING}, and the target's is {embedding.shape[1]} wide, not "
                f"{head.config.hidden_size}"
            )
        tensors[EMBEDDING] = embedding.float()
    inlet, own = Inlet(head), Head(head, vocab_size)
    tensors["lm_head.projection.weight"] = tensors.pop("lm_head.weight")
    of_inlet = {name: one for name, one in tensors.items() if name.startswith(_INLET)}
    _give(head.name, inlet, of_inlet)
    _give(head.name, own, {name: one for name, one in tensors.items() if name not in of_inlet})
    return inlet.eval(), own.eval()


def _give(name: str, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load all parameters of a module."""
    wanted = module.state_dict()
    for kind, which in (
        ("in none of the files", wanted.keys() - tensors.keys()),
        ("not read: the head is of another form", tensors.keys() - wanted.keys()),
    ):
        if which:
            raise BundleError(f"{name}: {min(which).replace(LAYER, 'layers.0.')} is {kind}")
    for key, one in tensors.items():
        if one.shape != wanted[key].shape:
            raise BundleError(
                f"{name}: {key} is {list(one.shape)}, by its configuration {list(wanted[key].shape)}"
            )
    module.load_state_dict(tensors)
