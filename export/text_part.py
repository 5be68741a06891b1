"""Text parts: the language model inside a checkpoint of several models, opened as a causal language model of its own.

The certificate compares with the whole model's logits on text: what it does beside its language model must show there.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Language models without a causal class: of a text their three axes of positions are equal, which is plain rotation.
_PLAIN = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_AXES = ("mrope_section", "mrope_interleaved")
# What they always do, and a causal class by a field of its own.
_ALWAYS = {"norm_topk_prob": True}
# What causal classes do to their logits and whole models, which have a head of their own, do not.
_SCALES = ("logit_scale", "logits_scaling")


def text_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of a model's text part, that of a causal decoder; None where it has no such part."""
    if config.is_encoder_decoder or type(config) not in AutoModelForImageTextToText._model_mapping:
        return None
    own = config.get_text_config(decoder=True)
    kind = _PLAIN.get(own.model_type, own.model_type)
    if own is config or own.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    part = copy.deepcopy(own) if kind == own.model_type else _plain(own, kind)
    part.architectures = None
    for name in _SCALES:
        if hasattr(part, name):
            setattr(part, name, 1.0)
    return part


def _plain(own: PretrainedConfig, kind: str) -> PretrainedConfig:
    """Return the fields of a language model, its own class's defaults included, as another class's configuration."""
    fields = own.to_dict() | _ALWAYS
    del fields["model_type"]
    rope = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {key: rope[key] for key in rope if key not in _AXES}
    return CONFIG_MAPPING[kind].from_dict(fields)


def whole_class(config: PretrainedConfig) -> str:
    """Return the name of the class of a model that has a text part."""
    return str(AutoModelForImageTextToText._model_mapping[type(config)].__name__)


def language_model(whole: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return the text part of a loaded model as a causal language model, which shares its weights.

    Args:
        whole: the model.
        config: what ``text_part`` returns of its configuration.

    Raises:
        ValueError: its language model has other weights than ``config``'s class.
    """
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
    _take(model.base_model, whole.get_decoder())
    _take(model.get_output_embeddings(), whole.get_output_embeddings())
    return model.eval()


def _take(own: nn.Module, given: nn.Module) -> None:
    """Give a module the parameters and stored buffers of another."""
    found = given.state_dict(keep_vars=True)
    shapes = (
        {(name, one.shape) for name, one in held.items()} for held in (own.state_dict(), found)
    )
    if others := set.symmetric_difference(*shapes):
        what = f"{type(own).__name__} and {type(given).__name__} differ in {min(others)[0]}"
        raise ValueError(f"its language model is not as its configuration says ({what})")
    for name, value in found.items():
        path, _, key = name.rpartition(".")
        module = own.get_submodule(path)
        held = module._parameters if key in module._parameters else module._buffers
        held[key] = value
