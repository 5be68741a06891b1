"""Checkpoints in Hugging Face form: opened by their configurations, and refused before any work is done.

Every refusal names its reason, so that nobody waits for an export that cannot succeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.tasks import TasksManager
from outrider.engines.base import BundleError
from outrider.engines.bundle.states import StatesEntry
from outrider.export.folder import check_weight_files, read_config, read_generation_config
from outrider.export.gguf.folder import GGUF
from outrider.export.gguf.model import load_stored
from outrider.export.graph.tracing.probe import refuse_other_part, refuse_untraceable
from outrider.export.kinds import TEXT_GENERATION, task_of
from outrider.export.model_config import EncoderConfig, ModelConfig, read_model_config
from outrider.export.text_part import language_model, text_part
from outrider.export.weights.half_weights import BFLOAT16, FLOAT16
from outrider.export.weights.mapped import give_weights
from outrider.export.weights.packed.matrices import PackedLayout, packed_layout
from outrider.export.weights.packed.model import load_unpacked
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
from transformers.utils import logging as transformers_logging

DEFAULT_MAX_SOURCE = 512
_FLOAT32_BITS = 32
# Types of 16 bits, by their names in safetensors.
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder in Hugging Face form, read no further than its configuration.

    Attributes:
        task: that opens it.
        packed: how its weights are packed as integers; None where they are not.
        is_gguf: whether its matrices are in a GGUF file.
        whole: configuration of the model that ``config`` is the text part of; None where it is the whole.
        states: what its mixers keep of each slot of which one token may be rejected; None without mixers.
    """

    path: Path
    config: PretrainedConfig
    model_config: ModelConfig
    task: str
    packed: PackedLayout | None = None
    is_gguf: bool = False
    whole: PretrainedConfig | None = None
    states: StatesEntry | None = None

    def within(self, max_context: int) -> Checkpoint:
        """Return the checkpoint for texts of so many tokens at most, from which a wider window hides nothing."""
        window = self.model_config.window
        if window is None or window < max_context:
            return self
        return replace(self, model_config=replace(self.model_config, window=None))

    def with_features(self, size: int) -> Checkpoint:
        """Return the checkpoint for a head that reads so many numbers of each token."""
        return replace(self, model_config=self.model_config.with_features(size))

    def slot_states(self, max_gamma: int) -> StatesEntry | None:
        """Return what mixers keep of each slot where so many drafts may be rejected; None without mixers."""
        return self.states and replace(self.states, max_open=max(max_gamma, 1))

    def num_weight_bytes(self) -> int:
        """Return the size of the weights in bytes, as they are stored or, of packed ones, as float32 at most."""
        files = (*self.path.glob("*.safetensors"), *self.path.glob("*.gguf"))
        stored = sum(file.stat().st_size for file in files)
        return stored if self.packed is None else stored * _FLOAT32_BITS // self.packed.bits

    def num_parameters(self) -> int:
        """Return how many numbers the weights are, by the type that most bytes are stored in.

        Of a GGUF file it is how many float32 numbers take as much memory as an export of its blocks.
        """
        kinds = self._stored_kinds()
        is_narrow = self.is_gguf or (kinds & _HALVES.keys() and self.packed is None)
        width = 2 if is_narrow else 4
        return self.num_weight_bytes() // width

    def half_precision(self) -> str:
        """Return the 16-bit type that keeps this model's range: bfloat16 where any of its weights is stored so."""
        return BFLOAT16 if "BF16" in self._stored_kinds() else FLOAT16

    def load(self) -> PreTrainedModel:
        """Return the whole model in evaluation mode; ``weights.mapped`` runs it.

        Weights that are all stored in one type of 16 bits keep it, and stay in their files, mapped. All else is
        float32, with the numbers of a model that is loaded as float32; packed integers become what they stand for.

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
        """Return the whole model in evaluation mode, with all that it computes in one type.

        Raises:
            BundleError: weights are missing or unreadable (only safetensors are read).
        """
        model_class = AutoModelForImageTextToText
        if self.whole is None:
            model_class = TasksManager.get_model_class_for_task(
                self.task, model_type=self.config.model_type, library="transformers"
            )
        try:
            with _quiet_transformers():
                model, report = self._from_files(model_class, kind)
        except (OSError, ValueError, RuntimeError) as error:
            raise BundleError(f"{self.path.name}: cannot load the weights: {error}") from error
        self._refuse_unlike(report)
        return model.eval()

    def decoder_of(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return what is exported of the loaded model: its text part, which shares its weights, or itself."""
        return model if self.whole is None else language_model(model, self.config)

    def _from_files(
        self, model_class: Any, kind: torch.dtype
    ) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """Return the model of a class and what Transformers found missing."""
        if self.is_gguf:
            return load_stored(model_class, self.config, self.path, kind)
        if self.packed is not None:
            whole = self.whole or self.config
            return load_unpacked(model_class, whole, self.path, self.packed, kind)
        found: tuple[PreTrainedModel, Mapping[str, Any]] = model_class.from_pretrained(
            self.path,
            dtype=kind,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            # PyTorch's grouped products want rows of 16 bytes, which experts need not have.
            experts_implementation="eager",
        )
        return found

    def _refuse_unlike(self, report: Mapping[str, Any]) -> None:
        """Refuse weights that Transformers would fill with random numbers."""
        if missing := sorted(report["missing_keys"]):
            raise BundleError(
                f"{self.path.name}: {len(missing)} weights are in none of the files: {missing[0]}"
            )
        for name, stored, wanted in sorted(report["mismatched_keys"]):
            raise BundleError(
                f"{self.path.name}: {name} is stored as {list(stored)}, by config.json it is {list(wanted)}"
            )

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
def _quiet_transformers() -> Iterator[None]:
    """Load without the bars and tables of Transformers: stages are reported in lines, and refusals are one."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def open_checkpoint(
    path: Path, *, max_context: int | None, max_source: int | None = None
) -> Checkpoint:
    """Return the checkpoint at ``path``, or refuse it by its configuration.

    Args:
        path: a folder.
        max_context: tokens of a text at most; None for whatever the model can.
        max_source: tokens of a source at most, for models with an encoder; None for ``DEFAULT_MAX_SOURCE``, or
            as many positions as the encoder knows where these are fewer.

    Raises:
        BundleError: a kind that cannot be exported (see ``kinds`` and ``graph.tracing.probe``), weights quantised in a
            way that is not read, fewer positions than ``max_context`` or ``max_source``, a broken folder; says which.
    """
    config = read_config(path)
    quantization = getattr(config, "quantization_config", None) or {}
    is_gguf = quantization.get("quant_method") == GGUF
    packed = None if is_gguf else packed_layout(path.name, quantization or None)
    task = task_of(path.name, config)
    part = text_part(config)
    whole, config = (None, config) if part is None else (config, part)
    model_config = _model_config(path, config, whole)
    states = None
    if task == TEXT_GENERATION:
        states = refuse_untraceable(path.name, config, model_config)
    if whole is not None:
        refuse_other_part(path.name, whole, config)
    if max_context is not None:
        _refuse_limits(path.name, model_config, max_context)
    if model_config.source is not None:
        most = _max_source(path.name, model_config.source, max_source)
        model_config = replace(model_config, source=replace(model_config.source, max_source=most))
    check_weight_files(path)
    opened = Checkpoint(
        path=path,
        config=config,
        model_config=model_config,
        task=task,
        packed=packed,
        is_gguf=is_gguf,
        whole=whole,
        states=states,
    )
    return opened if max_context is None else opened.within(max_context)


def _model_config(
    path: Path, config: PretrainedConfig, whole: PretrainedConfig | None
) -> ModelConfig:
    # As Transformers does: of the whole model before its text part.
    ends = GenerationConfig(eos_token_id=getattr(whole, "eos_token_id", None))
    try:
        return read_model_config(config, read_generation_config(path) or ends)
    except AttributeError as error:
        raise BundleError(
            f"{path.name}: {config.model_type} names a size otherwise: {error}"
        ) from error
    except AmbiguousGlobalPerLayerAttributeError as error:
        raise BundleError(
            f"{path.name}: {config.model_type} has layers that differ by more than their caches: {error}"
        ) from error


def _refuse_limits(name: str, model_config: ModelConfig, max_context: int) -> None:
    most = model_config.max_position
    if most < max_context and model_config.changing_rope:
        raise BundleError(
            f"{name}: max_context {max_context} is above {most}, where the angles of rope_type "
            f"{model_config.changing_rope} change for all tokens, which a graph cannot follow; export with "
            f"--max-context {most}"
        )
    if most < max_context:
        raise BundleError(
            f"{name}: max_context {max_context} is above the model's {most} positions"
        )


def _max_source(name: str, source: EncoderConfig, asked: int | None) -> int:
    if asked is None:
        return min(DEFAULT_MAX_SOURCE, source.max_source)
    if asked < 1:
        raise BundleError(f"{name}: max_source {asked} must be at least 1")
    if asked > source.max_source:
        raise BundleError(
            f"{name}: max_source {asked} is above the encoder's {source.max_source} positions"
        )
    return asked
