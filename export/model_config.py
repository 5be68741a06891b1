"""Sizes and special tokens of a model, read from its configuration alone.

Sizes come from optimum's normalised configurations. What these do not know comes from Transformers' own: heads of a
shared cache, another vocabulary or another depth of the decoder, and every architecture that optimum has no names for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from optimum.utils import (
    NormalizedConfig,
    NormalizedConfigManager,
    NormalizedSeq2SeqConfig,
    NormalizedTextConfig,
)
from transformers import GenerationConfig, PretrainedConfig

UNLIMITED_POSITIONS = 1 << 30
"""Positions of a model whose configuration names no limit."""
# Kinds of layers by their names in Transformers. Of a layer with both the attention beside the mixer is a full one.
_BOTH = "hybrid"
CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", _BOTH})
"""Layers that cache a key and a value per token."""
MIXER_LAYERS = frozenset({"conv", "linear_attention", _BOTH})
"""Layers that keep a recurrent state, or a window of a convolution's inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes of a model's encoder.

    Attributes:
        num_layers: of the encoder.
        num_heads: H of the cache of sources.
        head_size: D of the cache of sources.
        max_source: tokens of a source at most: positions that the encoder knows, or fewer where so opened.
        vocab_size: of the sources' tokens.
        hidden_size: width of what the encoder answers.
    """

    num_layers: int
    num_heads: int
    head_size: int
    max_source: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """Layers of a model of which some keep a recurrent state, by their numbers in Transformers.

    Attributes:
        attention: that cache keys and values, in order; ``ModelConfig.num_layers`` counts these.
        mixers: that keep a state or a window, in order; a layer may do both.
    """

    attention: tuple[int, ...]
    mixers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and special tokens of a decoder, and sizes of its encoder if it has one.

    Attributes:
        num_layers: those with a cache of their own.
        num_kv_heads: H of the cache; of the first layer, where it differs by layer.
        head_size: D of the cache, likewise.
        caches: H and D of each layer, where they differ; else empty.
        num_reading: layers behind these that read the caches of earlier ones.
        ring_columns: the most columns of layers with a window, where their caches are to be rings on the CPU; else 0.
        feature_size: numbers of a token that are cached for a head, as the last of the layers (``graph.tracing.taps``);
            0 without one.
        vocab_size: V of the logits.
        max_position: positions that the model knows, in tokens; of a ``changing_rope`` only the original length.
        window: tokens that layers with a sliding window see; None where all see everything, and of a checkpoint
            that was opened for texts that fit into the window.
        has_experts: whether layers route tokens to experts.
        pad_token_id: what texts of a batch are padded with in training; None where unknown.
        decoder_start_token_id: the first token of every answer to a source; None where unknown.
        parallel_token: stands for tokens that are not known yet, in drafts that continue over it (PARD's
            ``pard_token``); None in all others.
        source: of its encoder; None for a decoder-only model.
        changing_rope: type of the rotary embedding, where the angles of all tokens change once a text is longer than
            ``max_position``; else empty.
        kinds: of its layers, where some keep a recurrent state; else None.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    parallel_token: int | None = None
    source: EncoderConfig | None = None
    has_experts: bool = False
    changing_rope: str = ""
    kinds: LayerKinds | None = None
    caches: tuple[tuple[int, int], ...] = ()
    num_reading: int = 0
    ring_columns: int = 0
    feature_size: int = 0

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """H and D of the cache of each layer."""
        return self.caches or ((self.num_kv_heads, self.head_size),) * self.num_layers

    @property
    def has_equal_layers(self) -> bool:
        """Whether each layer attends to a cache of its own, all of one size."""
        own = self.caches[:-1] if self.feature_size else self.caches
        is_one_size = not own or (self.feature_size > 0 and len(set(own)) == 1)
        return is_one_size and not self.num_reading

    @property
    def num_attending(self) -> int:
        """Layers that attend to a cache."""
        return self.num_layers + self.num_reading - (self.feature_size > 0)

    def with_features(self, size: int) -> ModelConfig:
        """Return these sizes with a layer more, in which ``size`` numbers of a token are cached for a head."""
        return replace(
            self,
            num_layers=self.num_layers + 1,
            caches=(*self.heads, (1, size // 2)),
            feature_size=size,
        )


def read_model_config(
    config: PretrainedConfig, generation: GenerationConfig | None = None
) -> ModelConfig:
    """Return the sizes of a model; generation settings override its special tokens."""
    sizes, kinds = _normalized(config), _layer_kinds(config)
    # What attends nowhere may count heads of another kind.
    has_attention = kinds is None or bool(kinds.attention)
    num_heads = int(sizes.num_attention_heads) if has_attention else 0
    latent_size = _latent_head_size(config)
    vocab_size = int(getattr(config, "decoder_vocab_size", None) or sizes.vocab_size)
    source = config if generation is None or generation.eos_token_id is None else generation
    eos = getattr(source, "eos_token_id", None)
    max_position, changing_rope = _max_position(config)
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    caches = _caches(config)
    num_reading = (getattr(config, "kv_sharing_modes", None) or []).count("reuse")
    num_layers = _num_layers(config, sizes) if kinds is None else len(kinds.attention)
    num_kv_heads, head_size = caches[0] if caches else (_num_kv_heads(config, num_heads), None)
    return ModelConfig(
        num_layers=num_layers - num_reading,
        num_kv_heads=num_kv_heads if latent_size is None else num_heads,
        head_size=(latent_size or head_size or _head_size(config, sizes)) if has_attention else 0,
        vocab_size=vocab_size,
        max_position=max_position,
        window=window_of(config),
        # Default ids of an architecture may lie outside a smaller vocabulary.
        eos_token_ids=tuple(sorted(i for i in eos_ids if 0 <= i < vocab_size)),
        bos_token_id=_token_id(config, "bos_token_id", vocab_size),
        pad_token_id=_token_id(config, "pad_token_id", vocab_size),
        decoder_start_token_id=_token_id(config, "decoder_start_token_id", vocab_size),
        parallel_token=_token_id(config, "pard_token", vocab_size),
        source=_source_facts(config, num_heads) if config.is_encoder_decoder else None,
        has_experts=has_experts(config),
        changing_rope=changing_rope,
        kinds=kinds,
        caches=caches[: num_layers - num_reading],
        num_reading=num_reading,
    )


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether a configuration counts experts, by whatever name: so many in a layer, or chosen by a token."""
    # Doge's counts are there where it has none.
    if getattr(config, "is_moe", None) is False:
        return False
    return any(
        "expert" in name and isinstance(value, int) and value > 0 and value is not True
        for name, value in config.to_dict().items()
    )


def _normalized(config: PretrainedConfig) -> NormalizedConfig:
    """Return a decoder's sizes by the names that all architectures have in common."""
    if config.is_encoder_decoder:
        # Its class for BART's family reads the encoder's heads for the decoder's too.
        return NormalizedSeq2SeqConfig(config.get_text_config(decoder=True))
    try:
        known = NormalizedConfigManager.get_normalized_config_class(config.model_type)
    except KeyError:
        return NormalizedTextConfig(config)
    return known(config)


def _num_kv_heads(config: PretrainedConfig, num_heads: int) -> int:
    if not num_heads:
        return 0
    if getattr(config, "multi_query", False):  # GPT-BigCode's
        return 1
    return int(getattr(config, "num_key_value_heads", None) or num_heads)


def _source_facts(config: PretrainedConfig, num_heads: int) -> EncoderConfig:
    """Return the sizes of an encoder, what it answers being kept in so many heads of the decoder."""
    sizes = NormalizedSeq2SeqConfig(config.get_text_config(encoder=True))
    decoder = config.get_text_config(decoder=True)
    return EncoderConfig(
        num_layers=int(sizes.encoder_num_layers),
        num_heads=num_heads,
        head_size=_head_size(config, decoder),
        max_source=_max_position(config)[0],
        vocab_size=int(config.vocab_size),
        hidden_size=int(sizes.hidden_size),
    )


def _token_id(config: PretrainedConfig, name: str, vocab_size: int) -> int | None:
    found = getattr(config, name, None)
    return found if found in range(vocab_size) else None


def _num_layers(config: PretrainedConfig, sizes: NormalizedConfig) -> int:
    # T5's, whose decoder may have another depth.
    return int(getattr(config, "num_decoder_layers", None) or sizes.num_layers)


def _layer_kinds(config: PretrainedConfig) -> LayerKinds | None:
    kinds = getattr(config, "layer_types", None) or ()
    mixers = tuple(number for number, kind in enumerate(kinds) if kind in MIXER_LAYERS)
    attention = tuple(number for number, kind in enumerate(kinds) if kind in CACHED_LAYERS)
    return LayerKinds(attention=attention, mixers=mixers) if mixers else None


def _caches(config: PretrainedConfig) -> tuple[tuple[int, int], ...]:
    """Return heads and their size of each layer's cache, where a configuration says that they differ; else nothing."""
    if config.model_type == "mimo_v2_flash":  # its layers with a window have twice as many
        size, heads = int(config.head_dim), int(config.num_key_value_heads)
        is_window = [kind == "sliding_attention" for kind in config.layer_types]
        return tuple((heads * (1 + one), size) for one in is_window) if any(is_window) else ()
    if not {"head_dim", "num_key_value_heads"} & set(config.per_layer_attributes or ()):
        return ()
    return tuple(
        (int(one.num_key_value_heads or one.num_attention_heads), int(one.head_dim))
        for one in config.per_layer_config
    )


def _head_size(config: PretrainedConfig, sizes: Any) -> int:
    return int(
        getattr(config, "head_dim", None)
        or int(sizes.hidden_size) // int(sizes.num_attention_heads)
    )


def _latent_head_size(config: PretrainedConfig) -> int | None:
    """Return the size of a key or value, the larger one, that layers expand latents to; None where there are none."""
    if not getattr(config, "kv_lora_rank", None):
        return None
    key_size = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim)
    return max(key_size, int(config.v_head_dim))


def _max_position(config: PretrainedConfig) -> tuple[int, str]:
    """Return the positions that a model knows, and the type of a rotary embedding that ends them; else empty.

    Transformers gives all tokens other angles once a text is longer than the original length, those of cached keys
    too. A graph has one set of angles, that of texts up to this length.
    """
    own = int(getattr(config, "max_position_embeddings", None) or UNLIMITED_POSITIONS)
    given = getattr(config, "rope_parameters", None) or {}
    limits = []
    # One for all layers, or one for each type of layer.
    for rope in (given, *given.values()):
        kind = (rope.get("rope_type") or "") if isinstance(rope, dict) else ""
        if kind == "longrope":
            limits.append((int(rope["original_max_position_embeddings"]), kind))
        elif "dynamic" in kind and not rope.get("alpha"):  # HunYuan's, which fixes the angles
            limits.append((own, kind))
    return min([*limits, (own, "")], key=itemgetter(0))


def window_of(config: PretrainedConfig) -> int | None:
    """Return the tokens that layers with a sliding window see; None where all see everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        is_used = "sliding_attention" in layer_types
    else:
        is_used = getattr(config, "use_sliding_window", True)
    return int(window) if window and is_used else None
