"""What a bundle says of the texts of encoder-decoder checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import LANGUAGE, SOURCE_TOKENIZER_FILE, TEXT, Template
from outrider.export.tokenizers.text2text import read_tokenizers, write_tokenizers
from tokenizers import Tokenizer
from transformers import AutoConfig

from tests.export.tokenizers.conftest import ENGLISH, LANGUAGES, SIZES, trained

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "template", "prefix"),
    [
        ("t5", (TEXT, 2), (0,)),
        ("bart", (0, TEXT, 2), (2, 0)),
        ("blenderbot", (TEXT, 2), (1,)),
        ("pegasus", (TEXT, 1), (0,)),
        ("mbart", (TEXT, 2, LANGUAGE), (LANGUAGE,)),
        ("mbart50", (LANGUAGE, TEXT, 2), (2, LANGUAGE)),
        ("plbart", (TEXT, 2, LANGUAGE), (LANGUAGE,)),
        ("m2m100", (LANGUAGE, TEXT, 2), (2, LANGUAGE)),
        ("nllb", (LANGUAGE, TEXT, 2), (2, LANGUAGE)),
    ],
)
def test_frames_are_those_of_the_checkpoints_tokenizer(
    family: str, template: Template, prefix: Template, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint(family)
    found = write_tokenizers(path, AutoConfig.from_pretrained(path), tmp_path)
    assert found.source_template == template
    assert found.decoder_prefix == prefix
    assert bool(found.languages) == (LANGUAGE in template)
    assert not found.has_source_tokenizer
    assert [one.name for one in tmp_path.iterdir()] == ["tokenizer.json"]
    size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    assert all(index < size for index in found.languages.values())


def test_a_pair_of_pieces_is_two_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("marian")
    found = write_tokenizers(path, AutoConfig.from_pretrained(path), tmp_path)
    pad = json.loads((path / "config.json").read_text())["pad_token_id"]
    assert (found.source_template, found.decoder_prefix) == ((TEXT, 0), (pad,))
    assert found.has_source_tokenizer
    assert found.shares_vocabulary
    assert (tmp_path / SOURCE_TOKENIZER_FILE).is_file()


def test_languages_are_those_of_the_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint("nllb"))
    found = write_tokenizers(checkpoint("nllb"), config, tmp_path)
    assert tuple(found.languages) == LANGUAGES
    assert [*found.languages.values()] == [300, 301, 302]
    assert (found.default_source_language, found.default_target_language) == ("", "")
    named = write_tokenizers(
        checkpoint("plbart"), AutoConfig.from_pretrained(checkpoint("plbart")), tmp_path
    )
    assert (named.default_source_language, named.default_target_language) == (
        "__python__",
        "__en_XX__",
    )


def test_padding_is_banned_where_it_has_no_position_or_the_checkpoint_says_so(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    for family, banned in (("m2m100", (1,)), ("nllb", (1,)), ("bart", ()), ("marian", ())):
        config = AutoConfig.from_pretrained(checkpoint(family))
        found = write_tokenizers(checkpoint(family), config, tmp_path)
        assert found.banned_token_ids == banned
    folder = tmp_path / "with_generation"
    shutil.copytree(checkpoint("marian"), folder)
    pad = json.loads((folder / "config.json").read_text())["pad_token_id"]
    asked = {"bad_words_ids": [[pad]], "decoder_start_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    found = write_tokenizers(folder, AutoConfig.from_pretrained(folder), tmp_path)
    assert found.banned_token_ids == (pad,)
    assert found.generation_defaults == {"bad_words_ids": [[pad]]}


def test_generation_defaults_of_an_old_checkpoint_stand_in_its_config(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("bart")
    found = write_tokenizers(path, AutoConfig.from_pretrained(path), tmp_path)
    assert found.generation_defaults == {"num_beams": 4, "no_repeat_ngram_size": 3}


def test_generation_defaults_are_finite(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(checkpoint("bart"), folder)
    (folder / "generation_config.json").write_text('{"length_penalty": Infinity}')
    with pytest.raises(BundleError, match=r"generation_config\.json: .* finite, in length_penalty"):
        write_tokenizers(folder, AutoConfig.from_pretrained(folder), tmp_path)


@pytest.mark.parametrize(
    ("start", "forced", "prefix", "named"),
    [
        (300, None, (LANGUAGE,), "deu_Latn"),
        (2, 302, (2, LANGUAGE), "fra_Latn"),
        (300, 300, (LANGUAGE, LANGUAGE), "deu_Latn"),
        (300, 0, (LANGUAGE, 0), "deu_Latn"),
    ],
)
def test_the_place_of_the_language_is_where_the_checkpoint_has_one(
    start: int,
    forced: int | None,
    prefix: Template,
    named: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "one"
    shutil.copytree(checkpoint("nllb"), folder)
    asked = {"decoder_start_token_id": start, "forced_bos_token_id": forced}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    found = write_tokenizers(folder, AutoConfig.from_pretrained(folder), tmp_path)
    assert (found.decoder_prefix, found.default_target_language) == (prefix, named)


def test_a_tokenizer_file_alone_is_enough(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its own frame counts, not that of the architecture's usual tokenizer."""
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copyfile(checkpoint("bart") / "tokenizer.json", folder / "tokenizer.json")
    config = AutoConfig.for_model("t5", vocab_size=300, d_model=16, num_layers=1)
    config.decoder_start_token_id = 1
    config.save_pretrained(folder)
    found = write_tokenizers(folder, config, tmp_path)
    assert (found.source_template, found.decoder_prefix) == ((0, TEXT, 2), (1,))
    ours, theirs = (one / "tokenizer.json" for one in (tmp_path, folder))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_has_no_place_in_the_model_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint("nllb"))
    config.vocab_size = 302
    with pytest.raises(BundleError, match=r"'fra_Latn' has id 302, .* ends at 301"):
        write_tokenizers(checkpoint("nllb"), config, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_special_tokens_that_the_model_does_not_know_are_left_out(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    shutil.copytree(checkpoint("bart"), folder)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<more>"])
    description = json.loads(tokenizer.to_str())
    # As of BART's <mask>, which is among the pieces too.
    description["model"]["vocab"]["<more>"] = 300
    file.write_text(json.dumps(description))
    config = AutoConfig.from_pretrained(folder)
    write_tokenizers(folder, config, tmp_path)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (
        written.get_vocab()
        == Tokenizer.from_file(str(checkpoint("bart") / "tokenizer.json")).get_vocab()
    )
    assert read_tokenizers(folder, config).answers == (tmp_path / "tokenizer.json").read_text()
    # Its id follows the last that is left.
    tokenizer.add_tokens(["plain"])
    tokenizer.save(str(file))
    with pytest.raises(BundleError, match=r"'plain' has id 300, .* ends at 299"):
        read_tokenizers(folder, config)


def test_what_stands_around_texts_has_a_place_in_the_model(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(checkpoint("bart"))
    config.decoder_start_token_id = 300
    with pytest.raises(BundleError, match=r"decoder_prefix has id 300, .* ends at 299"):
        write_tokenizers(checkpoint("bart"), config, tmp_path)


def test_a_tokenizer_that_misses_its_languages_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Transformers gives the languages of a class ids behind the vocabulary, or takes other special tokens for them."""
    folder = tmp_path / "one"
    shutil.copytree(checkpoint("nllb"), folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NllbTokenizer"}')
    with pytest.raises(BundleError, match="but the model's vocabulary ends at 309"):
        write_tokenizers(folder, AutoConfig.from_pretrained(folder), tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(trained("bpe", ENGLISH))
    with pytest.raises(BundleError, match="wants languages, but has no tokens for them"):
        read_tokenizers(folder, AutoConfig.from_pretrained(folder))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("marian", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(BundleError, match="no tokenizer that Transformers opens"):
        read_tokenizers(tmp_path, AutoConfig.from_pretrained(tmp_path))
