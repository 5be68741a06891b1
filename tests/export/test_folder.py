"""A broken folder is refused in one line that names the file, before a weight is read."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.checkpoint import open_checkpoint
from safetensors.torch import load_file, save_file

from scripts.check_parity import random_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    random_model("llama", num_positions=64).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def text(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content, encoding="utf-8")


def cut_off(folder: Path) -> None:
    file = first_shard(folder)
    file.write_bytes(file.read_bytes()[:-100])


def fill_with_noise(folder: Path) -> None:
    first_shard(folder).write_bytes(b"version https://git-lfs.github.com/spec/v1")


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json in the folder"),
        (text("config.json", "{ no"), "config.json is not JSON: .*line 1 column 3"),
        (text("config.json", "[]"), "config.json is no JSON object"),
        (text("config.json", "{}"), "config.json names no model_type"),
        (text("config.json", '{"model_type": "nobody"}'), "knows no model_type 'nobody'$"),
        (
            text("config.json", '{"model_type": "nobody", "auto_map": {"AutoConfig": "a.B"}}'),
            "'nobody'; code that comes with a checkpoint is not run",
        ),
        (
            text("config.json", '{"model_type": "llama", "hidden_size": "wide"}'),
            "no readable config.json: .*'hidden_size' expected int",
        ),
        (text("generation_config.json", "{"), "generation_config.json is not JSON"),
        (text(INDEX, "{"), f"{INDEX} is not JSON"),
        (lambda folder: first_shard(folder).unlink(), f"model-00001.* is missing, which {INDEX}"),
        (cut_off, "model-00001.* is cut off, or no safetensors file"),
        (fill_with_noise, "model-00001.* is cut off, or no safetensors file"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(
    break_it: Callable[[Path], object], reason: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(whole, folder)
    break_it(folder)
    with pytest.raises(BundleError, match=f"^mine: .*{reason}") as refusal:
        open_checkpoint(folder, max_context=64)
    assert "\n" not in str(refusal.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere: no such folder"):
        open_checkpoint(tmp_path / "nowhere", max_context=64)


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What Transformers logs meanwhile, which its own handler would print."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_weights_that_no_file_has_are_never_made_up(
    whole: Path, tmp_path: Path, told: list[str]
) -> None:
    folder = rewritten(whole, tmp_path, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(BundleError, match="1 weights are in none of the files"):
        open_checkpoint(folder, max_context=64).load()
    # A table of Transformers beside it would be many lines.
    assert not told


def test_weights_of_another_shape_are_refused_by_name(
    whole: Path, tmp_path: Path, told: list[str]
) -> None:
    def shorten(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(7)

    folder = rewritten(whole, tmp_path, shorten)
    with pytest.raises(BundleError, match=r"model.norm.weight is stored as \[7\].* it is \[64\]"):
        open_checkpoint(folder, max_context=64).load()
    assert not told


def rewritten(
    whole: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """A copy with its changed weights in one file."""
    folder = tmp_path / "mine"
    shutil.copytree(whole, folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    shards = sorted(set(index["weight_map"].values()))
    weights = {name: one for file in shards for name, one in load_file(folder / file).items()}
    for file in (INDEX, *shards):
        (folder / file).unlink()
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
