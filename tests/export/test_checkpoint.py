import shutil
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.export.checkpoint import open_checkpoint
from outrider.export.pipeline import ExportOptions, export_bundle
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig


def write_config(folder: Path, family: str, **fields: object) -> Path:
    AutoConfig.for_model(family, **fields).save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("vit", {}, "not a causal decoder of Transformers"),
        ("mamba", {}, "recurrent state"),
        ("lfm3", {}, "recurrent state.*conv"),
        ("lfm2", {"layer_types": ["conv"] * 32}, "does not attend"),
        (
            "lfm2",
            {"layer_types": ["conv", "sliding_attention"], "num_hidden_layers": 2},
            "other layers beside recurrent ones .sliding_attention.",
        ),
        ("llama4_text", {}, "parts of a text only.*chunked_attention"),
        ("bloom", {}, "attention interface"),
        ("falcon", {}, "attention interface"),
        ("mpt", {}, "attention interface"),
        ("gptj", {}, "attention interface"),
        ("bert", {}, "bert: the model is an encoder, whose tokens see later ones"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is for fill-mask"),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "for text-classification"),
        ("llama", {"architectures": ["OwnLlama"]}, "OwnLlama, which Transformers does not know"),
        ("bert", {"architectures": ["BertForPreTraining"]}, "but a BertForPreTraining"),
        ("moshi", {}, "several models.*audio_encoder_config"),
        ("doge", {}, "builds its own attention mask"),
        ("diffllama", {}, "attends 32 times in 16 layers"),
        ("jetmoe", {}, "experts that do not go through the interface"),
        ("marian", {"is_encoder_decoder": False}, "takes no positions"),
        ("llama", {"max_position_embeddings": 100}, "100 positions"),
        ("bart", {"max_position_embeddings": 100}, "100 positions"),
        ("whisper", {}, "does not go from text to text"),
        ("speech_to_text", {}, "does not go from text to text"),
        ("seamless_m4t_v2", {}, "does not go from text to text"),
        ("switch_transformers", {}, "experts.*num_experts"),
        ("nllb-moe", {}, "experts.*num_experts"),
        ("longt5", {}, "parts of a source.*local_radius"),
        ("longt5", {"encoder_attention_type": "transient-global"}, "parts of a source"),
        ("led", {}, "parts of a source.*attention_window"),
        ("bigbird_pegasus", {}, "parts of a source.*block_size"),
        ("pegasus_x", {}, "parts of a source.*block_size"),
        ("prophetnet", {}, "attention interface"),
        ("fsmt", {}, "attention interface"),
        ("t5gemma", {}, "configurations of their own"),
        ("laguna", {}, "computes by softplus"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_its_reason(
    family: str, fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, family, **fields)
    with pytest.raises(BundleError, match=reason):
        open_checkpoint(folder, max_context=128)


def test_sources_are_as_long_as_the_encoder_has_positions(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "bart", max_position_embeddings=300)
    assert max_source(folder) == 300
    assert max_source(folder, 80) == 80
    with pytest.raises(BundleError, match="max_source 301 is above the encoder's 300 positions"):
        max_source(folder, 301)
    for asked in (0, -5):
        with pytest.raises(BundleError, match=f"max_source {asked} must be at least 1"):
            max_source(folder, asked)
    write_config(tmp_path, "t5")
    assert max_source(folder) == 512
    assert max_source(folder, 4096) == 4096


def max_source(folder: Path, asked: int | None = None) -> int:
    model_config = open_checkpoint(folder, max_context=128, max_source=asked).model_config
    assert model_config.source is not None
    return model_config.source.max_source


def test_a_window_counts_where_texts_may_be_longer(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "mistral", sliding_window=128)
    assert open_checkpoint(folder, max_context=128).model_config.window is None
    assert open_checkpoint(folder, max_context=129).model_config.window == 128


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BundleError, match="safetensors"):
        open_checkpoint(folder, max_context=128)


def test_draft_with_tokens_that_are_words_is_refused(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = tiny_checkpoints
    other = tmp_path / "draft"
    shutil.copytree(draft, other)
    words = Tokenizer(models.WordLevel({"the": 0, "house": 1}, unk_token="the"))
    words.save(str(other / "tokenizer.json"))
    with pytest.raises(BundleError, match="byte-level BPE or SentencePiece"):
        export_bundle(
            target=target,
            draft=other,
            out=tmp_path / "out",
            options=ExportOptions(max_context=64),
            progress=pytest.fail,
        )
    assert not (tmp_path / "out").exists()
