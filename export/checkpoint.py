"""Checkpoints in Hugging Face form: their sizes, and refusals before any work is done.

Sizes come from optimum's normalised configurations where it knows the architecture, else from the configuration.
Every refusal names its reason, so that nobody waits for an export that cannot succeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.tasks import TasksManager
from optimum.utils import NormalizedConfigManager
from outrider.engines.base import BundleError
from outrider.export.kinds import task_of
from outrider.export.weights.half_weights import BFLOAT16, FLOAT16
from outrider.export.weights.mapped import give_weights
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

DEFAULT_MAX_SOURCE = 512
# Types of 16 bits, by their names in safetensors.
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
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
class ModelFacts:
    """Sizes and special tokens of a decoder, and sizes of its encoder if it has one.

    Attributes:
        num_kv_heads: H of the cache.
        head_size: D of the cache.
        vocab_size: V of the logits.
        max_position: positions that the model knows, in tokens.
        window: tokens the narrowest attention layer sees; None where all see everything.
        pad_token_id: what texts of a batch are padded with in training; None where unknown.
        decoder_start_token_id: the first token of every answer to a source; None where unknown.
        source: of its encoder; None for a decoder-only model.
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
    source: SourceFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder in Hugging Face form, read no further than its configuration; ``task`` is the one that opens it."""

    path: Path
    config: PretrainedConfig
    facts: ModelFacts
    task: str

    def num_weight_bytes(self) -> int:
        """Return the size of the stored weights, in bytes."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def half_precision(self) -> str:
        """Return the 16-bit type that keeps this model's range: bfloat16 where any of its weights is stored so."""
        return BFLOAT16 if "BF16" in self._stored_kinds() else FLOAT16

    def load(self) -> PreTrainedModel:
        """Return the model in evaluation mode; ``weights.mapped`` runs it.

        Weights that are all stored in one type of 16 bits keep it, and stay in their files, mapped. All else is
        float32, with the numbers of a model that is loaded as float32.

        Raises:
            BundleError: weights are missing or unreadable (only safetensors are read).
        """
        kinds = self._stored_kinds()
        kind = _HALVES[min(kinds)] if len(kinds) == 1 and kinds <= _HALVES.keys() else torch.float32
        model = self.load_as(kind)
        if kind is torch.float32:
            return model
        # In 16 bits buffers and constants of the model would be rounded too.
        with no_init_weights():
            wide = type(model)._from_config(model.config, dtype=torch.float32)
        give_weights(wide, model)
        return wide.eval()

    def load_as(self, kind: torch.dtype) -> PreTrainedModel:
        """Return the model in evaluation mode, with all that it computes in one type.

        Raises:
            BundleError: weights are missing or unreadable (only safetensors are read).
        """
        model_class = TasksManager.get_model_class_for_task(
            self.task, model_type=self.config.model_type, library="transformers"
        )
        try:
            with _without_progress_bars():
                model = model_class.from_pretrained(
                    self.path, dtype=kind, local_files_only=True, use_safetensors=True
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise BundleError(f"{self.path.name}: cannot load the weights: {error}") from error
        return model.eval()

    def _stored_kinds(self) -> set[str]:
        """Return the types of the stored weights, by safetensors' names.

        Raises:
            BundleError: a file is not of safetensors.
        """
        kinds = set()
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as weights:
                    kinds |= {weights.get_slice(name).get_dtype() for name in weights.offset_keys()}
            except SafetensorError as error:
                raise BundleError(f"{self.path.name}: cannot load the weights: {error}") from error
        return kinds


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Load without the bars of Transformers; the stages of an export are reported in lines."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


def open_checkpoint(path: Path, *, max_context: int, max_source: int | None = None) -> Checkpoint:
    """Return the checkpoint at ``path``, or refuse it by its configuration.

    Args:
        path: a folder.
        max_context: tokens of a text at most.
        max_source: tokens of a source at most, for models with an encoder; None for ``DEFAULT_MAX_SOURCE``, or
            as many positions as the encoder knows where these are fewer.

    Raises:
        BundleError: a kind that cannot be exported (see ``kinds``), an attention window or positions below
            ``max_context`` or ``max_source``, or no configuration at all; says which.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path.name}: no readable config.json: {error}") from error
    task = task_of(path.name, config)
    facts = model_facts(config, _generation_config(path))
    _refuse_limits(path.name, facts, max_context)
    if facts.source is not None:
        most = _max_source(path.name, facts.source, max_source)
        facts = replace(facts, source=replace(facts.source, max_source=most))
    if not any(path.glob("*.safetensors")):
        raise BundleError(f"{path.name}: no .safetensors weights in the folder")
    return Checkpoint(path=path, config=config, facts=facts, task=task)


def model_facts(config: PretrainedConfig, generation: GenerationConfig | None = None) -> ModelFacts:
    """Return the sizes of a model; generation settings override its special tokens."""
    sizes: Any = config
    if config.is_encoder_decoder:
        sizes = config.get_text_config(decoder=True)
    elif config.model_type in NormalizedConfigManager._conf:
        sizes = NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    num_heads = int(sizes.num_attention_heads)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    vocab_size = int(getattr(config, "decoder_vocab_size", None) or sizes.vocab_size)
    source = config if generation is None or generation.eos_token_id is None else generation
    eos = source.eos_token_id
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return ModelFacts(
        num_layers=_num_layers(config, sizes),
        num_kv_heads=int(num_kv_heads),
        head_size=_head_size(config, sizes),
        vocab_size=vocab_size,
        max_position=_max_position(config),
        window=_window(config),
        # Default ids of an architecture may lie outside a smaller vocabulary.
        eos_token_ids=tuple(sorted(i for i in eos_ids if 0 <= i < vocab_size)),
        bos_token_id=_token_id(config, "bos_token_id", vocab_size),
        pad_token_id=_token_id(config, "pad_token_id", vocab_size),
        decoder_start_token_id=_token_id(config, "decoder_start_token_id", vocab_size),
        source=_source_facts(config, num_heads) if config.is_encoder_decoder else None,
    )


def _source_facts(config: PretrainedConfig, num_heads: int) -> SourceFacts:
    """Return the sizes of an encoder, what it answers being kept in so many heads of the decoder."""
    sizes = config.get_text_config(encoder=True)
    decoder = config.get_text_config(decoder=True)
    return SourceFacts(
        num_layers=int(sizes.num_hidden_layers),
        num_heads=num_heads,
        head_size=_head_size(config, decoder),
        max_source=_max_position(config),
        vocab_size=int(config.vocab_size),
        hidden_size=int(sizes.hidden_size),
    )


def _token_id(config: PretrainedConfig, name: str, vocab_size: int) -> int | None:
    found = getattr(config, name, None)
    return found if found in range(vocab_size) else None


def _num_layers(config: PretrainedConfig, sizes: Any) -> int:
    # T5's, whose decoder may have another depth; in other configurations "decoder_layers" became the sizes' own.
    found = getattr(config, "num_decoder_layers", None) or getattr(sizes, "num_layers", None)
    return int(found or sizes.num_hidden_layers)


def _head_size(config: PretrainedConfig, sizes: Any) -> int:
    return int(
        getattr(config, "head_dim", None)
        or int(sizes.hidden_size) // int(sizes.num_attention_heads)
    )


def _max_position(config: PretrainedConfig) -> int:
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def _refuse_limits(name: str, facts: ModelFacts, max_context: int) -> None:
    if facts.max_position < max_context:
        raise BundleError(
            f"{name}: max_context {max_context} is above the model's {facts.max_position} positions"
        )
    if facts.window is not None and facts.window < max_context:
        raise BundleError(
            f"{name}: a sliding window of {facts.window} tokens is active below max_context "
            f"{max_context}; export with max_context <= {facts.window}"
        )


def _max_source(name: str, source: SourceFacts, asked: int | None) -> int:
    if asked is None:
        return min(DEFAULT_MAX_SOURCE, source.max_source)
    if asked < 1:
        raise BundleError(f"{name}: max_source {asked} must be at least 1")
    if asked > source.max_source:
        raise BundleError(
            f"{name}: max_source {asked} is above the encoder's {source.max_source} positions"
        )
    return asked


def _window(config: PretrainedConfig) -> int | None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        is_used = "sliding_attention" in layer_types
    else:
        is_used = getattr(config, "use_sliding_window", True)
    return int(window) if window and is_used else None


def _generation_config(path: Path) -> GenerationConfig | None:
    file = path / "generation_config.json"
    if not file.is_file():
        return None
    return GenerationConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
