"""Export of encoder-decoder pairs: what the bundle holds and says, and which pairs are refused before any work."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.encoder_decoder import TEXT, SourceEntry
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import write_manifest
from outrider.export.checkpoint import open_checkpoint
from outrider.export.part import WEIGHT_KINDS, halved_logits, make_part
from outrider.export.pipeline import ExportOptions, export_bundle
from safetensors.numpy import save_file
from transformers import BartConfig

from tests.addons import needs_accelerators
from tests.export.text2text_models import random_text2text


@needs_accelerators
def test_bundle_describes_both_encoders(tiny_text2text_bundle: Path) -> None:
    bundle = load_bundle(tiny_text2text_bundle)
    manifest = bundle.manifest
    assert manifest.schema_version == 2
    target, draft = manifest.target, manifest.draft
    assert draft is not None
    sizes = {"num_heads": 4, "head_size": 8, "max_source": 96, "vocab_size": 512}
    assert target.source == SourceEntry(**sizes, hidden_size=32)
    assert draft.source == SourceEntry(**sizes, hidden_size=16)
    assert (target.num_layers, target.num_kv_heads, target.head_size) == (2, 4, 8)
    assert (target.narrowest_span, target.max_tree_nodes) == (1, 16)
    assert bundle.limits(target).max_source == 96
    for model in ("target", "draft"):
        graphs = {name for name in manifest.files if name.startswith(f"{model}/")}
        files = ("encode", "model", "grouped", "tree", "device", "device_tree", "device_encode")
        assert {f"{model}/{one}.onnx" for one in files} <= graphs
        assert {one for one in graphs if one.endswith(".data")} == {f"{model}/model.onnx.data"}
        assert manifest.certificate[model]["tolerance"] < 1e-3


def test_texts_begin_as_the_checkpoint_says(tiny_text2text_bundle: Path) -> None:
    manifest = load_bundle(tiny_text2text_bundle).manifest
    assert manifest.text2text is not None
    assert manifest.text2text.decoder_prefix == (0,)
    assert TEXT in manifest.text2text.source_template
    assert manifest.text2text.shares_vocabulary
    assert manifest.eos_token_ids == (1,)


@needs_accelerators
def test_graphs_for_accelerators_are_certified(tiny_text2text_bundle: Path) -> None:
    manifest = load_bundle(tiny_text2text_bundle).manifest
    assert manifest.target.device_precision == "float32"
    found = manifest.certificate["target"]["device"]
    for case in ("verify", "read_longest", "source_reused", "tree_masks", "tree_paths"):
        assert found[case]["num_greedy_equal"] == found[case]["num_compared"] > 0


@needs_accelerators
def test_a_bundle_without_the_encoder_of_accelerators_is_refused(
    tiny_text2text_bundle: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(tiny_text2text_bundle, tmp_path / "bundle")
    (root / "target" / "device_encode.onnx").unlink()
    manifest = load_bundle(tiny_text2text_bundle).manifest
    write_manifest(root, replace(manifest, files=hash_files(root)))
    with pytest.raises(BundleError, match=r"target/device_encode\.onnx: the graph .* is missing"):
        load_bundle(root)


def test_accelerators_compute_in_the_type_of_the_weights_or_in_float32(tmp_path: Path) -> None:
    """Where weights have 16 bits PyTorch's logits in 16 bits are the tolerance; overflow in float16 refuses nothing."""
    model = random_text2text("bart")
    model.final_logits_bias[0, 5] = 1e6
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, max_context=64)
    halves = dict.fromkeys(("half", "float16", "int8", "int4"), "float16")
    assert {kind: make_part("target", checkpoint, kind).precision for kind in WEIGHT_KINDS} == (
        {**halves, "float32": "float32", "bfloat16": "bfloat16", "w8a8": ""}
    )
    kind, logits = halved_logits(make_part("target", checkpoint, "float16"), max_gamma=3)
    assert kind == "bfloat16"
    assert np.isfinite(logits).all()


def test_an_encoder_wants_a_target_with_one(
    tiny_text2text_checkpoints: tuple[Path, Path],
    tiny_checkpoints: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(BundleError, match="draft: its encoder wants sources"):
        export_pair(tiny_checkpoints[0], tiny_text2text_checkpoints[1], tmp_path)
    with pytest.raises(BundleError, match="max_source: the target has no encoder"):
        export_pair(tiny_checkpoints[0], None, tmp_path, max_source=64)
    with pytest.raises(BundleError, match="draft: it has no encoder to read the target's sources"):
        export_pair(tiny_text2text_checkpoints[0], tiny_checkpoints[1], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 300}, "draft: its encoder reads 300 tokens, the target's 512"),
        ({"vocab_size": 400}, "draft: its encoder knows 400 tokens, the target's 500"),
    ],
)
def test_a_draft_reads_whatever_the_target_reads(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 600, "vocab_size": 500}
    for name, those in (("target", sizes), ("draft", sizes | changes)):
        config = BartConfig(**those)
        config.save_pretrained(tmp_path / name)
        save_file({}, tmp_path / name / "model.safetensors")
    with pytest.raises(BundleError, match=message):
        export_pair(tmp_path / "target", tmp_path / "draft", tmp_path)


def test_draft_with_other_tokens_is_refused(
    tiny_text2text_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = tiny_text2text_checkpoints
    other = tmp_path / "draft"
    shutil.copytree(draft, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    swapped = {index: token for token, index in vocabulary.items()}
    vocabulary[swapped[10]], vocabulary[swapped[20]] = 20, 10
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(BundleError, match="id 10 is"):
        export_pair(target, other, tmp_path)


def export_pair(target: Path, draft: Path | None, folder: Path, **options: int) -> None:
    export_bundle(
        target=target,
        draft=draft,
        out=folder / "out",
        options=ExportOptions(max_context=64, **options),
        progress=pytest.fail,
    )
