"""What a checkpoint says of its answers: what they begin with, what is never drawn, and what generation it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import LANGUAGE, Template, TemplateToken
from outrider.export.tokenizers.own import Languages
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

# Of a generation_config.json: special tokens, which have fields of their own, and how Transformers runs.
_NOT_ASKED = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "transformers_version",
    "use_cache",
    "return_dict_in_generate",
}
_NOT_ASKED_PREFIXES = ("_", "output_", "cache_", "compile_")


def read_generation(path: Path) -> GenerationConfig:
    """Return what a checkpoint asks for in generation, of config.json where it has no file for that."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            path, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )


def generation_defaults(generation: GenerationConfig) -> dict[str, object]:
    """Return what a checkpoint asks for in generation, but for special tokens, as JSON values.

    Raises:
        BundleError: a number is not finite.
    """
    asked = {
        name: value
        for name, value in generation.to_diff_dict().items()
        if value is not None and name not in _NOT_ASKED and not name.startswith(_NOT_ASKED_PREFIXES)
    }
    try:
        plain: dict[str, object] = json.loads(json.dumps(asked, allow_nan=False))
    except ValueError as error:
        raise BundleError(
            f"generation_config.json: numbers must be finite, in {', '.join(asked)}"
        ) from error
    return plain


def decoder_prefix(
    name: str, config: PretrainedConfig, generation: GenerationConfig, languages: Languages
) -> tuple[Template, str]:
    """Return what every answer begins with, and the code of the answers' language where the checkpoint names one.

    As Transformers' ``generate`` does it: the decoder's start token, then the forced one. A model of languages has the
    answer's language in one of both places: as the start where that is a language or not given, else as the forced one.

    Args:
        name: of the checkpoint, for messages.
        config: of the model.
        generation: what the checkpoint asks for in generation.
        languages: of its tokenizer.

    Raises:
        BundleError: the checkpoint does not say how answers begin.
    """
    start = _special(config, generation, "decoder_start_token_id")
    forced = _special(config, generation, "forced_bos_token_id")
    codes = {index: code for code, index in languages.ids.items()}
    if start is None and not codes:
        start = _special(config, generation, "bos_token_id")
    if start is None and not codes:
        raise BundleError(f"{name}: config.json has no decoder_start_token_id")
    begins_with_language = bool(codes) and (start is None or start in codes)
    ends_with_language = bool(codes) and not begins_with_language
    named = start if begins_with_language else forced
    prefix: list[TemplateToken] = [LANGUAGE if start is None or begins_with_language else start]
    if ends_with_language or (forced is not None and forced in codes):
        prefix.append(LANGUAGE)
    elif forced is not None:
        prefix.append(forced)
    return tuple(prefix), codes.get(named, "") if named is not None else ""


def banned_tokens(config: PretrainedConfig, generation: GenerationConfig) -> tuple[int, ...]:
    """Return the ids that no answer may have: padding, where the checkpoint bans it or gives it no position."""
    pad = config.pad_token_id
    if pad is None:
        return ()
    is_banned = [pad] in (generation.bad_words_ids or ())
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    return (int(pad),) if is_banned or skips_padding(model) else ()


def skips_padding(model: PreTrainedModel) -> bool:
    """Return whether padding within an answer has no position, so that the tokens behind it have other ones."""
    for module in model.get_decoder().modules():
        # What positions come from token ids in.
        count = getattr(module, "create_position_ids_from_input_ids", None)
        pad: Any = getattr(module, "padding_idx", None)
        if count is not None and pad is not None:
            first, _, last = count(torch.tensor([[pad + 1, pad, pad + 1]]), pad, 0)[0].tolist()
            if last - first != 2:
                return True
    return False


def _special(config: PretrainedConfig, generation: GenerationConfig, field: str) -> int | None:
    found = getattr(generation, field, None)
    found = getattr(config, field, None) if found is None else found
    return int(found) if isinstance(found, int) else None
