"""Checkpoints of several models, exported as their language model, against the whole model's logits on text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.export import text_part
from outrider.export.certificate.certify import certify_bundle
from outrider.export.certificate.reference import reference_logits
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from safetensors.torch import load_file, save_file

from scripts.lab.sweep.tiny import MAX_CONTEXT, random_model, save_checkpoint, tiny_config
from tests.conftest import VOCAB_SIZE, write_tokenizer
from tests.export.weights.packed_models import Packing, pack_folder
from tests.mutants import put_in

FAMILIES = {
    "gemma3": "Gemma3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "llava": "LlamaForCausalLM",
    "llava_onevision": "Qwen2ForCausalLM",
    # Logits that its language model alone would scale.
    "aya_vision": "Cohere2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "lfm2_vl": "Lfm2ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
TEXTS = np.random.default_rng(7).integers(0, 120, (3, 60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a checkpoint."""
    return tmp_path / "whole"


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, max_context=MAX_CONTEXT)


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder: Path, keep: Callable[[str], str | None]) -> None:
    """Give each weight another name, or drop it."""
    file = folder / "model.safetensors"
    named = [(keep(name), one) for name, one in load_file(file).items()]
    save_file({name: one for name, one in named if name}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_part_answers_as_the_whole_model_does(family: str, folder: Path) -> None:
    """Weights have their published names; three axes of positions that a text makes equal are plain rotation."""
    save_checkpoint(family, folder)
    checkpoint = opened(folder)
    whole = checkpoint.load()
    part = checkpoint.decoder_of(whole)
    assert (type(part).__name__, whole.config.model_type) == (FAMILIES[family], family)
    expected = reference_logits(whole, TEXTS)
    assert np.array_equal(reference_logits(part, TEXTS), expected)
    assert np.abs(expected).max() > 1
    # Not copied: an export of a large one holds it once.
    shared = {one.data_ptr() for one in whole.parameters()}
    assert {one.data_ptr() for one in part.parameters()} <= shared


def test_stored_buffers_are_those_of_the_whole_model(folder: Path) -> None:
    """Kimi K2.5 chooses experts by biases that are no parameters."""
    whole = random_model(tiny_config("kimi_k25"))
    biases = [one for name, one in whole.named_buffers() if "e_score_correction_bias" in name]
    for bias in biases:
        bias.copy_(torch.linspace(1, 0, len(bias)))
    whole.save_pretrained(folder)
    checkpoint = opened(folder)
    part = checkpoint.decoder_of(checkpoint.load())
    assert biases and np.array_equal(reference_logits(part, TEXTS), reference_logits(whole, TEXTS))


def test_later_names_of_weights_are_read_too(folder: Path) -> None:
    save_checkpoint("gemma3", folder)
    before = opened(folder).load().state_dict()
    later = {"language_model.model.": "model.language_model.", "vision": "model.vision"}
    change_weights(
        folder,
        lambda name: next(
            (new + name.removeprefix(old) for old, new in later.items() if name.startswith(old)),
            f"model.{name}",
        ),
    )
    after = opened(folder).load().state_dict()
    assert all(np.array_equal(after[name], one) for name, one in before.items())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_published_configuration_without_a_text_config_is_read(family: str, folder: Path) -> None:
    """Its sizes stand beside the vision tower's, and its rotation has the type "mrope"."""
    save_checkpoint(family, folder)
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    text = whole.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "use_sliding_window": False}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    del text["model_type"], text["layer_types"]
    before = opened(folder)
    expected = reference_logits(before.load(), TEXTS)
    file.write_text(json.dumps(text | whole))
    after = opened(folder)
    assert after.model_config == before.model_config
    assert np.array_equal(reference_logits(after.load(), TEXTS), expected)
    assert np.array_equal(reference_logits(after.decoder_of(after.load()), TEXTS), expected)


@pytest.mark.parametrize("lost", ["lm_head", "layers.1.mlp.up_proj", "visual.blocks.0"])
def test_a_missing_weight_is_refused(lost: str, folder: Path) -> None:
    save_checkpoint("qwen2_5_vl", folder)
    change_weights(folder, lambda name: None if lost in name else name)
    with pytest.raises(BundleError, match=rf"weights are in none of the files: .*{lost}"):
        opened(folder).load()


def test_the_whole_model_says_whether_its_head_is_tied(folder: Path) -> None:
    save_checkpoint("mistral3", folder)
    assert not [name for name in load_file(folder / "model.safetensors") if "lm_head" in name]
    checkpoint = opened(folder)
    assert checkpoint.config.tie_word_embeddings is False
    part = checkpoint.decoder_of(checkpoint.load())
    assert part.lm_head.weight is part.model.embed_tokens.weight
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(BundleError, match=r"1 weights are in none of the files: lm_head\.weight"):
        opened(folder).load()


def test_texts_end_with_the_whole_models_tokens(folder: Path) -> None:
    save_checkpoint("gemma3", folder)
    (folder / "generation_config.json").unlink()
    assert opened(folder).model_config.eos_token_ids == (2,)
    change_config(folder, eos_token_id=[1, 106])
    assert opened(folder).model_config.eos_token_ids == (1, 106)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert opened(folder).model_config.eos_token_ids == (7, 9)


def test_packed_weights_are_those_of_the_text_part(folder: Path) -> None:
    save_checkpoint("qwen2_5_vl", folder)
    drawn = pack_folder(folder, Packing(method="awq"), "model.layers")
    checkpoint = opened(folder)
    part = dict(checkpoint.decoder_of(checkpoint.load()).named_parameters())
    for module, one in drawn.items():
        assert np.array_equal(part[f"{module}.weight"].detach().T, one.weight), module
    assert checkpoint.packed is not None and len(drawn) == 14


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("paligemma", {}, "tokens of a prompt see later ones"),
        ("lfm3_vl", {}, r"recurrent state.*conv"),
        ("llama4", {}, "parts of a text only.*chunked_attention"),
        ("blip-2", {}, "cannot be opened: .* not as .*OPTModel and OPTForCausalLM differ in"),
        ("git", {}, "several models .vision_config., without a language model that is known"),
        ("gemma3", {"architectures": ["Gemma3ForSequenceClassification"]}, "not by Gemma3ForCond"),
    ],
)
def test_what_has_no_text_part_to_export_is_refused(
    family: str, fields: dict[str, object], reason: str, folder: Path
) -> None:
    tiny_config(family).save_pretrained(folder)
    change_config(folder, **fields)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(BundleError, match=reason) as refused:
        opened(folder)
    assert "\n" not in str(refused.value)


def save_with_tokens(folder: Path, seed: int, family: str = "gemma3") -> None:
    """Write a whole model, and a tokenizer that fits it."""
    config = tiny_config(family)
    config.text_config.vocab_size = VOCAB_SIZE
    random_model(config, seed).save_pretrained(folder)
    write_tokenizer(folder)


def test_a_bundle_says_what_it_is_the_text_part_of(
    export_small: Callable[..., Bundle], folder: Path, tmp_path: Path
) -> None:
    save_with_tokens(folder, seed=5)
    stages: list[str] = []
    bundle = export_small(target=folder, progress=stages.append)
    certificate = bundle.manifest.certificate["target"]
    assert isinstance(certificate, dict) and certificate["text_part_of"] == "gemma3"
    told = "target: loading gemma3, of which the text part is exported: images are refused"
    assert told in stages
    assert certify_bundle(bundle, {"target": folder})["target"]["rollback"]
    save_with_tokens(tmp_path / "other", seed=6)
    with pytest.raises(BundleError, match="differs by"):
        certify_bundle(bundle, {"target": tmp_path / "other"})


def test_a_part_that_answers_otherwise_than_the_whole_model_is_refused(
    export_small: Callable[..., Bundle], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its norms with the epsilon that the causal class has by itself, 1e-6 for 1e-5."""
    save_with_tokens(folder, seed=5, family="qwen2_5_vl")
    put_in(
        monkeypatch, text_part, "own.to_dict() | _ALWAYS", 'own.to_dict() | {"rms_norm_eps": 1e-6}'
    )
    with pytest.raises(BundleError, match="differ"):
        export_small(target=folder)
