"""Checkpoints of EAGLE-3 heads, in the dialects of their authors and of ``speculators``, read without trust.

Both say which of the target's streams a head reads (its taps), give its one layer, and map its ids to the target's:
``d2t`` is an offset, draft id i stands for target id i + d2t[i]. What a dialect leaves out, or a flag that is absent,
is as in the source. Every other tensor or form is refused by name: a head that is read wrongly drafts nearly nothing,
and says nothing.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and the checkpoints published with it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.export.folder import WRONG_FIELDS
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_CONFIG_FILE, _TORCH_FILE = "config.json", "pytorch_model.bin"
_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_LAYER_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Where the layer's tensors are, by dialect.
_LAYERS = {"midlayer.": "layer.", "layers.0.": "layer."}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MAPS = ("d2t", "t2d")
LAYER, EMBEDDING, PROJECTION = "layer.", "embed_tokens.weight", "fc.weight"
_LOGITS = "lm_head.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_OBJECTS = ("eagle_config", "transformer_layer_config")
_SIZES = (
    "target_hidden_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


def _is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_OBJECTS, ("an object", lambda value: isinstance(value, dict))),
    **dict.fromkeys(
        (*_FLAGS, "use_aux_hidden_state"),
        ("true or false", lambda value: isinstance(value, bool)),
    ),
    **dict.fromkeys(_SIZES, ("a whole number above 0", lambda value: _is_whole(value, 1))),
    _TAPS: (
        "a list of whole numbers from 0 on",
        lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    ),
    "num_hidden_layers": ("1", lambda value: _is_whole(value) and value == 1),
    "hidden_act": ("silu", lambda value: value == "silu"),
}
"""What fields must be, wherever they stand; null is as if they were absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint:
    """A head as it was read.

    Attributes:
        name: of its folder.
        config: of its one layer: a configuration of Llama or Qwen 3, whose ``vocab_size`` is V_draft.
        taps: layers of the target whose inputs it reads, in order; None for those that the source takes.
        target_hidden_size: width of each.
        norm_before_residual: whether the residual is the normed feature.
        norm_before_fc: whether one norm goes over all taps before they are projected.
        fc_norm: whether each tap has a norm of its own before.
        norm_output: whether the feature that is recycled is the normed one.
        tensors: float32 by name, the layer's below ``LAYER``.
        target_ids: [V_draft] int64, ascending or not, no id twice; None where the ids are the target's.
    """

    name: str
    config: PretrainedConfig
    taps: tuple[int, ...] | None
    target_hidden_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    tensors: Mapping[str, Tensor]
    target_ids: Tensor | None

    @property
    def num_taps(self) -> int:
        """Return how many streams it reads."""
        return int(self.tensors[PROJECTION].shape[1]) // self.target_hidden_size

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Return its taps in a target of so many layers.

        Raises:
            BundleError: they are not as many as its projection reads, or there are no such layers.
        """
        taps = self.taps or (2, num_layers // 2, num_layers - 3)
        if len(taps) != self.num_taps:
            raise BundleError(
                f"{self.name}: {len(taps)} layers are named, {PROJECTION} reads {self.num_taps}"
            )
        if not all(0 <= tap < num_layers for tap in taps):
            raise BundleError(
                f"{self.name}: it reads what enters layers {list(taps)}, the target has 0..{num_layers - 1}"
            )
        return taps


def is_head(path: Path) -> bool:
    """Return whether a folder holds a head of EAGLE-3.

    Raises:
        BundleError: it holds a head of another kind, which is named.
    """
    fields = _fields(path)
    named = fields.get("architectures")
    names = set(map(str, named)) if isinstance(named, list) else set()
    kind = fields.get("speculators_model_type")
    if other := _other_kind(fields, names, kind):
        raise BundleError(
            f"{path.name}: {other} is not served as a draft; heads of EAGLE-3 and draft models are"
        )
    is_pruned = "draft_vocab_size" in fields and fields.get("num_hidden_layers") == 1
    return bool(names & _ARCHITECTURES) or kind == "eagle3" or is_pruned


def _other_kind(fields: Mapping[str, Any], names: set[str], kind: object) -> str:
    """Return what heads of another kind are called; empty for EAGLE-3 and for no head."""
    if "medusa_num_heads" in fields:
        return "Medusa"
    if any("DFlash" in one for one in names) or "dflash_config" in fields:
        return "DFlash"
    if fields.get("parallel_drafting") or "ptd_token_id" in fields:
        return "P-EAGLE"
    return "" if kind in (None, "eagle3") else f"speculators_model_type {kind}"


def open_head(path: Path) -> HeadCheckpoint:
    """Return the head in a folder.

    Raises:
        BundleError: it is of a form that is not read, or broken; says which.
    """
    fields = _checked(path.name, _fields(path))
    eagle, layer = (_checked(path.name, fields.get(one) or {}) for one in _OBJECTS)
    if eagle.get("use_aux_hidden_state") is False:
        raise BundleError(
            f"{path.name}: eagle_config.use_aux_hidden_state is false: it reads the target's last state alone, which "
            "no target is exported to give"
        )
    told: dict[str, Any] = {**eagle, **fields}
    layer = layer or fields
    kind = str(layer.get("model_type", "llama"))
    if kind not in _LAYER_CONFIGS:
        raise BundleError(f"{path.name}: a layer of {kind}; {', '.join(_LAYER_CONFIGS)} are read")
    tensors = {_renamed(name): value for name, value in _weights(path).items()}
    maps = {name: tensors.pop(name) for name in _MAPS if name in tensors}
    for name in (PROJECTION, _LOGITS):
        if name not in tensors:
            raise BundleError(f"{path.name}: {name} is in none of the files")
    for name in tensors.keys() & {PROJECTION, _LOGITS, EMBEDDING}:
        if tensors[name].dim() != 2:
            raise BundleError(f"{path.name}: {name} is {list(tensors[name].shape)}, not a matrix")
    hidden_size, num_ids = tensors[PROJECTION].shape[0], tensors[_LOGITS].shape[0]
    config = _layer_config(path.name, kind, {**layer, "vocab_size": num_ids})
    if config.hidden_size != hidden_size:
        raise BundleError(
            f"{path.name}: {PROJECTION} answers {hidden_size} numbers, hidden_size is {config.hidden_size}"
        )
    taps = told.get(_TAPS)
    target_size = told.get("target_hidden_size", hidden_size)
    if tensors[PROJECTION].shape[1] % target_size:
        raise BundleError(
            f"{path.name}: {PROJECTION} reads {tensors[PROJECTION].shape[1]} numbers, no multiple of the "
            f"{target_size} of a target's layer"
        )
    return HeadCheckpoint(
        name=path.name,
        config=config,
        taps=tuple(taps) if taps else None,
        target_hidden_size=target_size,
        tensors={name: value.float() for name, value in tensors.items()},
        target_ids=_target_ids(path.name, maps, num_ids),
        **{flag: told.get(flag, False) for flag in _FLAGS},
    )


def _checked(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields of a configuration without those that are null.

    Raises:
        BundleError: one breaks its rule.
    """
    told = {field: value for field, value in fields.items() if value is not None}
    for field in _RULES.keys() & told.keys():
        rule, is_kept = _RULES[field]
        if not is_kept(told[field]):
            raise BundleError(
                f"{name}: {_CONFIG_FILE}: {field} must be {rule}, not {told[field]!r}"
            )
    return told


def _layer_config(name: str, kind: str, fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of the layer.

    Raises:
        BundleError: Transformers makes none of these fields, or no rotary embedding of it.
    """
    try:
        config = _LAYER_CONFIGS[kind].from_dict(
            {**fields, "num_hidden_layers": 1, "tie_word_embeddings": False}
        )
        LlamaRotaryEmbedding(config)
    except WRONG_FIELDS as error:
        what = " ".join(str(error).split())
        raise BundleError(f"{name}: no readable {_CONFIG_FILE}: {what}") from error
    return config


def _target_ids(name: str, maps: Mapping[str, Tensor], num_ids: int) -> Tensor | None:
    """Return the target's id of each draft id, [V_draft] int64; None without a map.

    Raises:
        BundleError: an id stands for a negative one or for another one's, or ``t2d`` marks others.
    """
    offsets = maps.get("d2t")
    if offsets is None:
        if "t2d" in maps:
            raise BundleError(f"{name}: it has t2d and no d2t")
        return None
    if offsets.shape != (num_ids,) or offsets.is_floating_point():
        raise BundleError(
            f"{name}: d2t is {offsets.dtype} {list(offsets.shape)}, lm_head.weight has {num_ids} rows"
        )
    ids = torch.arange(num_ids) + offsets.long()
    if int(ids.min()) < 0 or len(torch.unique(ids)) < num_ids:
        raise BundleError(f"{name}: d2t maps two ids to one, or one below 0: it holds offsets")
    marked = maps.get("t2d")
    if marked is not None:
        is_marked = torch.zeros(len(marked), dtype=torch.bool)
        if int(ids.max()) < len(marked):
            is_marked[ids] = True
        if not torch.equal(is_marked, marked.bool()):
            raise BundleError(f"{name}: t2d does not mark the ids that d2t maps to")
    return ids


def _renamed(name: str) -> str:
    for prefix, ours in _LAYERS.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _fields(path: Path) -> Mapping[str, Any]:
    """Return the fields of a folder's configuration; none where it has no readable one, which others refuse."""
    try:
        fields = json.loads((path / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder: of safetensors, else of PyTorch's own form, tensors alone.

    Raises:
        BundleError: there are none, or they cannot be read.
    """
    files = sorted(path.glob("*.safetensors"))
    old = path / _TORCH_FILE
    try:
        if files:
            return {name: one for file in files for name, one in load_file(file).items()}
        if old.is_file():
            found = torch.load(old, map_location="cpu", weights_only=True, mmap=True)
            if isinstance(found, dict) and all(isinstance(one, Tensor) for one in found.values()):
                return dict(found)
            raise BundleError(f"{path.name}: {_TORCH_FILE} holds other things than tensors")
    except (SafetensorError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise BundleError(f"{path.name}: cannot read the weights: {error}") from error
    raise BundleError(f"{path.name}: no .safetensors weights and no {_TORCH_FILE} in the folder")
