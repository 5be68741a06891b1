"""One pass of a model without weights, to learn before they are read whether its cache and attention can be taken over.

The pass is the one that is traced later, on PyTorch's meta device, which knows shapes and no numbers. So a model of any
size takes a second or two, and no memory.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.states import StatesEntry
from outrider.export.graph.tracing.angles import original_angles
from outrider.export.graph.tracing.experts import separate_experts
from outrider.export.graph.tracing.kv_export import (
    CanonicalDecoder,
    UnsupportedAttentionError,
    taken_over,
)
from outrider.export.graph.tracing.latents import angles_without_complex
from outrider.export.graph.tracing.mixers import Mixers, UnsupportedMixerError, replaced
from outrider.export.graph.tracing.signatures import decoder_signature
from outrider.export.graph.tracing.windows import Windows
from outrider.export.model_config import ModelConfig
from outrider.export.text_part import language_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

# What strangers' code raises where a pass does not go as it was written for.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Activations whose bits depend on an element's place in its tensor, by PyTorch's names; see ``graph.to_onnx``.
_PLACE_DEPENDENT = frozenset({"celu", "elu", "mish", "selu", "softplus"})


def mixer_sizes(
    config: PretrainedConfig, model_config: ModelConfig, max_open: int
) -> StatesEntry | None:
    """Return what the mixers of a model keep of each slot, as their calls tell; None where it has none.

    Raises:
        UnsupportedMixerError: a mixer is not one that the canonical graph can express.
    """
    if model_config.kinds is None:
        return None
    mixers = Mixers(model_config.kinds)
    example = decoder_signature(model_config).example
    _answered(
        _without_weights(config), model_config, Windows(model_config.max_position), mixers, example
    )
    return replace(mixers.sizes(), max_open=max_open)


def refuse_untraceable(
    name: str, config: PretrainedConfig, model_config: ModelConfig
) -> StatesEntry | None:
    """Refuse a decoder whose attention or cache is not that of the canonical graph; return what its mixers keep.

    Raises:
        BundleError: ``name`` cannot be exported; says why.
    """
    states = None
    try:
        states = mixer_sizes(config, model_config, max_open=1)
        reason = _why_not(config, model_config, states)
    except (UnsupportedAttentionError, UnsupportedMixerError) as error:
        reason = str(error)
    except _FAILURES as error:
        what = " ".join(str(error).split())
        reason = f"the model does not run with a cache from outside ({type(error).__name__}: {what[:160]})"
        if isinstance(error, NotImplementedError) or "meta tensor" in what:
            reason = "what the model computes depends on values, which a graph cannot express"
    if reason:
        raise BundleError(f"{name}: {config.model_type}: {reason}")
    return states


def refuse_other_part(name: str, whole: PretrainedConfig, config: PretrainedConfig) -> None:
    """Refuse a model of which ``config`` does not describe the text part.

    Raises:
        BundleError: ``name`` cannot be exported; says why.
    """
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForImageTextToText.from_config(copy.deepcopy(whole))
            language_model(model, config)
    except _FAILURES as error:
        what = " ".join(str(error).split()).partition(". ")[0][:160]
        raise BundleError(f"{name}: {whole.model_type} cannot be opened: {what}") from error


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """Records the calls of the operators that stand for attention and cache.

    Attributes:
        placed: operators of ``_PLACE_DEPENDENT`` that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.placed: set[str] = set()
        self.arguments: dict[str, list[dict[str, Any]]] = {"attend": [], "scatter_kv": []}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and note its arguments by name where it is one of them."""
        namespace, _, operator = func.name().partition("::")
        # Of a vector of parameters it is a constant of the graph.
        if namespace == "aten" and operator in _PLACE_DEPENDENT and args[0].dim() > 1:
            self.placed.add(operator)
        operator = operator.removesuffix("_scored")
        if namespace == "outrider" and operator in self.arguments:
            names = [argument.name for argument in func._schema.arguments]
            self.arguments[operator].append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


def _why_not(
    config: PretrainedConfig, model_config: ModelConfig, states: StatesEntry | None
) -> str:
    model = _without_weights(config)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if model_config.num_layers and not takes_positions:
        return (
            "the model takes no positions (position_ids), so its texts could not go on from a cache"
        )
    calls, windows = _Calls(), Windows(model_config.max_position)
    mixers = None if model_config.kinds is None else Mixers(model_config.kinds)
    example = decoder_signature(model_config, states).example
    with calls:
        logits = _answered(model, model_config, windows, mixers, example)
    if calls.placed:
        return (
            f"the model computes by {', '.join(sorted(calls.placed))}, which rounds by an element's place in the call, "
            "so that answers would depend on what else is in the batch"
        )
    attends, scattered = calls.arguments["attend"], calls.arguments["scatter_kv"]
    if takes_positions and not attends:
        return "the model does not attend through the attention interface of Transformers"
    num_layers = model_config.num_layers + model_config.num_reading
    if len(attends) != num_layers:
        return f"the model attends {len(attends)} times in {num_layers} layers"
    if not all(call["is_causal"] for call in attends):
        return "the model is an encoder, whose tokens see later ones"
    if len(scattered) != 2 * model_config.num_layers:
        return f"the model caches keys and values of {len(scattered) // 2} of {model_config.num_layers} layers"
    if reason := windows.why_not(model_config.window):
        return reason
    if tuple(logits.shape[1:]) != (example[2].shape[1], model_config.vocab_size):
        return f"the model answers {tuple(logits.shape)}, not a logit per token"
    return _why_other_cache(scattered, model_config)


def _answered(
    model: PreTrainedModel,
    model_config: ModelConfig,
    windows: Windows,
    mixers: Mixers | None,
    example: Any,
) -> torch.Tensor:
    """Return the logits of the pass that is traced later."""
    with (
        separate_experts(model),
        replaced(model, mixers),
        angles_without_complex(model),
        original_angles(model),
        taken_over(model, windows) as head,
        torch.no_grad(),
        torch.device("meta"),
    ):
        decoder = CanonicalDecoder(
            model, head, windows, max_position=model_config.max_position, mixers=mixers
        )
        logits: torch.Tensor = decoder(*_on_meta(example))[0]
    return logits


def _why_other_cache(scattered: list[dict[str, Any]], model_config: ModelConfig) -> str:
    # Keys and values of each layer.
    both = [one for one in model_config.heads for _ in range(2)]
    for call, wanted in zip(scattered, both, strict=True):
        found = (call["update"].shape[1], call["update"].shape[3])
        if found != wanted:
            return (
                f"a layer caches {found[0]} heads of {found[1]} per token, "
                f"the configuration says {wanted[0]} of {wanted[1]}"
            )
    return ""


def _without_weights(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


def _on_meta(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        return example.to("meta")
    return type(example)(map(_on_meta, example))
