"""What lies in a checkpoint's folder, configurations and files of weights: what is broken is found early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from outrider.engines.base import BundleError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig

_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
_INDEX_FILE = "model.safetensors.index.json"
WRONG_FIELDS = (
    ArithmeticError, AttributeError, KeyError, OSError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""What configurations raise at fields that they do not like."""


def read_config(path: Path) -> PretrainedConfig:
    """Return the configuration in a folder; code that comes with a checkpoint is never run.

    Raises:
        BundleError: no folder, no such file, no JSON, or nothing that Transformers knows; says which.
    """
    if not path.is_dir():
        raise BundleError(f"{path}: no such folder")
    name = path.name
    fields = _read_object(path, _CONFIG_FILE)
    kind = fields.get("model_type")
    if kind is None:
        raise BundleError(f"{name}: {_CONFIG_FILE} names no model_type")
    if kind not in CONFIG_MAPPING:
        own = "; code that comes with a checkpoint is not run" if fields.get("auto_map") else ""
        version = transformers.__version__
        raise BundleError(f"{name}: Transformers {version} knows no model_type {kind!r}{own}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except WRONG_FIELDS as error:
        what = " ".join(str(error).split())
        raise BundleError(f"{name}: no readable {_CONFIG_FILE}: {what}") from error


def read_generation_config(path: Path) -> GenerationConfig | None:
    """Return what a folder asks for in generation, if anything.

    Raises:
        BundleError: the file is not JSON, or its fields are not read.
    """
    if not (path / _GENERATION_FILE).is_file():
        return None
    fields = _read_object(path, _GENERATION_FILE)
    try:
        return GenerationConfig.from_dict(fields)
    except WRONG_FIELDS as error:
        what = " ".join(str(error).split())
        raise BundleError(f"{path.name}: no readable {_GENERATION_FILE}: {what}") from error


def check_weight_files(path: Path) -> None:
    """Refuse weights of which a file is missing or cut off, by the headers alone.

    Raises:
        BundleError: names the first such file.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BundleError(f"{path.name}: no .safetensors weights in the folder")
    if (path / _INDEX_FILE).is_file():
        named = _read_object(path, _INDEX_FILE).get("weight_map")
        shards = set(named.values()) if isinstance(named, dict) else set()
        if missing := sorted(shards - {file.name for file in files}):
            raise BundleError(f"{path.name}: {missing[0]} is missing, which {_INDEX_FILE} names")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise BundleError(
                f"{path.name}: {file.name} is cut off, or no safetensors file: {error}"
            ) from error


def _read_object(path: Path, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of the folder.

    Raises:
        BundleError: no such file, or no such object in it.
    """
    try:
        found = json.loads((path / file).read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path.name}: no {file} in the folder") from error
    except ValueError as error:
        raise BundleError(f"{path.name}: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BundleError(f"{path.name}: {file} is no JSON object")
    return found
