"""Converted SentencePiece models against the checkpoints' own tokenizers."""

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.base import BundleError
from outrider.export.tokenizers.agreement import (
    HARD_TEXTS,
    NUM_TEXTS,
    check_agreement,
    texts_to_compare,
)
from outrider.export.tokenizers.own import OwnTokenizer
from outrider.export.tokenizers.pieces import UNREACHED, read_model, tokenizer_description
from outrider.export.tokenizers.text2text import TokenizerPair, read_tokenizers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from tests.export.tokenizers.conftest import ENGLISH, GERMAN, trained, write_m2m100, write_marian

Checkpoint = Callable[[str], Path]
TEXTS = (*ENGLISH, *GERMAN, "", " a  b ", "ﬁne ½ e\u0301", "x ☃☃ y", "</s> a <pad>b", "▁a▁ b▁")


def opened(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = AutoTokenizer.from_pretrained(folder)
    own.clean_up_tokenization_spaces = False
    return own


def tokenizers_of(folder: Path) -> TokenizerPair:
    return read_tokenizers(folder, AutoConfig.from_pretrained(folder))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("family", ["m2m100", "m2m100-unigram", "plbart"])
def test_one_model_for_both_sides_keeps_ids_and_texts(family: str, checkpoint: Checkpoint) -> None:
    own, pair = opened(checkpoint(family)), tokenizers_of(checkpoint(family))
    assert pair.sources is None
    tokenizer, _ = pair.tokenizers()
    for text in TEXTS:
        found = own(text, add_special_tokens=False)["input_ids"]
        assert ids_of(tokenizer, text) == found
        assert tokenizer.decode(found).strip() == own.decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("family", ["marian", "marian-bpe"])
def test_sources_and_answers_have_their_own_pieces_of_one_vocabulary(
    family: str, checkpoint: Checkpoint
) -> None:
    own = opened(checkpoint(family))
    answers, sources = tokenizers_of(checkpoint(family)).tokenizers()
    assert answers.encode(GERMAN[0]).ids != sources.encode(GERMAN[0]).ids
    for text in TEXTS:
        assert ids_of(sources, text) == own(text, add_special_tokens=False)["input_ids"]
        found = own(text_target=text, add_special_tokens=False)["input_ids"]
        assert ids_of(answers, text) == found
        assert answers.decode(found).strip() == own.decode(found, skip_special_tokens=True)


def test_an_answer_may_have_any_token_of_the_vocabulary(checkpoint: Checkpoint) -> None:
    """Models write pieces that only sources are cut into."""
    own = opened(checkpoint("marian"))
    answers, sources = tokenizers_of(checkpoint("marian")).tokenizers()
    found = list(range(2, own.vocab_size - 1))
    foreign = [index for index in found if (answers.id_to_token(index) or "").startswith(UNREACHED)]
    assert foreign
    for tokenizer in (answers, sources):
        assert tokenizer.decode(found) == own.decode(found, skip_special_tokens=True)


def test_a_language_in_front_of_a_text_is_one_token(checkpoint: Checkpoint) -> None:
    own, (_, sources) = (
        opened(checkpoint("marian")),
        tokenizers_of(checkpoint("marian")).tokenizers(),
    )
    text = f">>deu<< {ENGLISH[0]}"
    assert ids_of(sources, text) == own(text, add_special_tokens=False)["input_ids"]
    assert sources.encode(text).ids[0] == own.convert_tokens_to_ids(">>deu<<")


def test_a_character_of_the_other_side_keeps_its_id_where_it_stands_alone(
    checkpoint: Checkpoint,
) -> None:
    own, (_, sources) = (
        opened(checkpoint("marian")),
        tokenizers_of(checkpoint("marian")).tokenizers(),
    )
    text = "the Maß of it"
    assert "ß" not in "".join(ENGLISH)
    assert own.convert_tokens_to_ids("ß") in ids_of(sources, text)
    assert ids_of(sources, text) == own(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("kind", "is_cut"), [("unigram", True), ("bpe", False)])
def test_a_piece_without_an_id_does_not_stop_a_checkpoint(
    kind: str, is_cut: bool, tmp_path: Path
) -> None:
    write_marian(tmp_path, kind, without="▁the")
    own = opened(tmp_path)
    _, sources = tokenizers_of(tmp_path).tokenizers()
    found = ids_of(sources, "all the people")
    assert (own.unk_token_id not in found) == is_cut
    if not is_cut:
        assert found == own("all the people", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<=000000000000)00$"}}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<=000000000000)0$"}}}, True),
    ],
)
def test_the_same_pieces_of_a_text_in_another_order_are_no_difference(
    changed: dict[str, dict[str, object]], is_refused: bool, tmp_path: Path
) -> None:
    """Fourteen zeros are twelve of threes and one of twos, which may stand anywhere."""
    write_m2m100(tmp_path, "unigram", {"00": -3.0, "000": -4.0})
    own = OwnTokenizer(tmp_path)
    side = own.sides()["answers"]
    description = tokenizer_description(own.name, side.model, side.vocabulary)
    changed["pre_tokenizer"] |= {"behavior": "Isolated", "invert": False}
    converted = Tokenizer.from_str(json.dumps(description | changed))
    number = next(n for n, text in enumerate(HARD_TEXTS) if "00000" in text)
    theirs = own.encode([HARD_TEXTS[number]], of_answers=True)[0]
    assert ids_of(converted, HARD_TEXTS[number]) != theirs
    with pytest.raises(BundleError, match=f"text {number} ") if is_refused else nullcontext():
        check_agreement(own, side, converted, of_answers=True)


def test_a_tokenizer_that_reads_otherwise_is_refused_by_the_text(checkpoint: Checkpoint) -> None:
    own = OwnTokenizer(checkpoint("m2m100-unigram"))
    side = own.sides()["answers"]
    description = tokenizer_description(own.name, side.model, side.vocabulary)
    check_agreement(own, side, Tokenizer.from_str(json.dumps(description)), of_answers=True)
    rows = description["model"]["vocab"]
    last = len(rows) - 110
    rows[last], rows[last - 1] = rows[last - 1], rows[last]
    swapped = Tokenizer.from_str(json.dumps(description))
    with pytest.raises(BundleError, match=rf"text \d+ of {NUM_TEXTS} has other ids"):
        check_agreement(own, side, swapped, of_answers=True)


def test_a_tokenizer_that_writes_otherwise_is_refused_by_the_text(checkpoint: Checkpoint) -> None:
    own = OwnTokenizer(checkpoint("marian"))
    side = own.sides()["answers"]
    description = tokenizer_description(own.name, side.model, side.vocabulary)
    description["decoder"] = None
    with pytest.raises(BundleError, match="text 2 of 1000 is decoded to another text"):
        check_agreement(own, side, Tokenizer.from_str(json.dumps(description)), of_answers=True)


def test_texts_to_compare_have_every_piece() -> None:
    pieces = [f"▁piece{number}" for number in range(500)]
    texts = texts_to_compare(pieces)
    assert len(texts) == NUM_TEXTS
    assert texts == texts_to_compare(pieces)
    assert all(any(f"piece{number}" in text for text in texts) for number in range(500))


def test_models_of_whole_words_are_refused(checkpoint: Checkpoint) -> None:
    vocabulary = OwnTokenizer(checkpoint("marian")).sides()["answers"].vocabulary
    model = read_model(trained("word", ENGLISH))
    with pytest.raises(BundleError, match="neither Unigram nor BPE"):
        tokenizer_description("mine", model, vocabulary)
