"""Sources and answers of models with an encoder, as tokens and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import (
    LANGUAGE,
    SOURCE_TOKENIZER_FILE,
    TEXT,
    EncoderDecoder,
)
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.text import NUM_CONTEXT_TOKENS, IncrementalDecoder
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

META = "\u2581"
# As Unigram and SentencePiece vocabularies have them: with and without a space, spaces alone, and half words.
PIECES = (META, META * 2, f"{META}the", f"{META}Haus", f"{META}ge", "s", "es", "ä", "\ufffd", ",")
SPECIAL = ("<pad>", "</s>", "<de>", "<fr>", "<it>")
IDS = {token: index for index, token in enumerate((*SPECIAL, "<unk>", *PIECES))}
LANGUAGES = {code: IDS[f"<{code}>"] for code in ("de", "fr", "it")}
FACTS = EncoderDecoder(
    decoder_prefix=(IDS["</s>"], LANGUAGE),
    source_template=(LANGUAGE, TEXT, IDS["</s>"]),
    languages=LANGUAGES,
    default_source_language="de",
)
PLAIN = EncoderDecoder(decoder_prefix=(IDS["<pad>"],), source_template=(TEXT, IDS["</s>"]))


def tokenizer(*, decoder: Any = None, pieces: tuple[str, ...] = PIECES) -> bytes:
    """A Unigram tokenizer of these pieces, with special tokens in front."""
    tokens = (*SPECIAL, "<unk>", *pieces)
    scores = [(token, -1.0 * index) for index, token in enumerate(tokens)]
    made = Tokenizer(models.Unigram(scores, unk_id=IDS["<unk>"]))
    made.normalizer = normalizers.Replace("  ", " ")
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoder or decoders.Metaspace()
    made.add_special_tokens([*SPECIAL, "<unk>"])
    return made.to_str().encode()


def test_a_source_is_framed_by_the_template_with_its_language() -> None:
    codec = EncoderDecoderCodec(tokenizer(), FACTS)
    the = IDS[f"{META}the"]
    assert codec.encode_source("the", "fr") == (IDS["<fr>"], the, IDS["</s>"])
    assert codec.encode_source("the") == (IDS["<de>"], the, IDS["</s>"])
    assert codec.sources.decode(codec.encode_source("the")) == "the"
    assert EncoderDecoderCodec(tokenizer(), PLAIN).encode_source("") == (IDS["</s>"],)


def test_an_answer_begins_with_the_language_and_what_the_request_wants() -> None:
    codec = EncoderDecoderCodec(tokenizer(), FACTS)
    assert codec.decoder_prefix("it") == (IDS["</s>"], IDS["<it>"])
    assert codec.encode_prefix("Haus") == (IDS[f"{META}Haus"],)
    assert EncoderDecoderCodec(tokenizer(), PLAIN).decoder_prefix() == (IDS["<pad>"],)


@pytest.mark.parametrize(
    ("encoder_decoder", "source", "target", "field", "rule"),
    [
        (FACTS, "en", "", "source_language", "must be a language of this model: de, fr, it$"),
        (FACTS, "", "", "target_language", "required by this model: de, fr, it$"),
        (FACTS, "", "en", "target_language", "must be a language of this model: de, fr, it$"),
        (PLAIN, "de", "", "source_language", "not told the language; leave the field out"),
        (PLAIN, "", "de", "target_language", "not told the language; leave the field out"),
    ],
)
def test_a_language_that_does_not_fit_is_refused_by_its_field(
    encoder_decoder: EncoderDecoder, source: str, target: str, field: str, rule: str
) -> None:
    codec = EncoderDecoderCodec(tokenizer(), encoder_decoder)
    with pytest.raises(RequestError, match=rule) as caught:
        codec.encode_source("the", source)
        codec.decoder_prefix(target)
    assert caught.value.field == field


def test_a_refusal_lists_a_few_languages_and_never_the_value() -> None:
    many = EncoderDecoder(
        decoder_prefix=(LANGUAGE,),
        source_template=(TEXT,),
        languages={f"l{number}": number for number in range(100)},
    )
    with pytest.raises(RequestError) as caught:
        EncoderDecoderCodec(tokenizer(), many).decoder_prefix("secret")
    assert str(caught.value).endswith("l0, l1, l2, l3, l4, l5 and 94 more")
    assert "secret" not in str(caught.value)


def test_sources_may_have_pieces_of_their_own() -> None:
    """The two sides split the same text otherwise, over one vocabulary."""
    others = (*PIECES[:2], f"{META}th", *PIECES[3:])
    codec = EncoderDecoderCodec(tokenizer(), FACTS, tokenizer(pieces=others))
    assert IDS[f"{META}the"] in codec.encode_prefix("the")
    assert IDS[f"{META}the"] in codec.encode_source("th")
    assert codec.spell(IDS[f"{META}the"]) == f"{META}the"
    with pytest.raises(BundleError, match=SOURCE_TOKENIZER_FILE):
        EncoderDecoderCodec(tokenizer(), FACTS, b"{}")


STRIPPED = decoders.Sequence(
    [decoders.Replace(META, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("decoder", [decoders.Metaspace(), STRIPPED], ids=["metaspace", "strip"])
def test_text_of_any_split_is_the_text_of_the_whole(decoder: Any, skip: bool) -> None:
    """Behind any prefix: the decoder takes the space of the first token that it sees, wherever that stands."""
    codec = TokenizersCodec(tokenizer(decoder=decoder))
    draw = np.random.default_rng(0)
    for _ in range(300):
        prefix, tokens = (
            draw.integers(0, len(IDS), size).tolist() for size in draw.integers(0, 24, 2)
        )
        stream = IncrementalDecoder(codec, prefix, skip_special_tokens=skip)
        shown, start = "", 0
        while start < len(tokens):
            end = start + int(draw.integers(1, 6))
            shown += stream.push(*tokens[start:end])
            start = end
        shown += stream.flush()
        before = codec.decode(prefix, skip)
        assert before + shown == codec.decode((*prefix, *tokens), skip)


def test_special_tokens_between_prefix_and_answer_do_not_cost_the_space() -> None:
    codec = TokenizersCodec(tokenizer())
    prefix = (IDS[f"{META}the"], *[IDS["</s>"]] * NUM_CONTEXT_TOKENS)
    stream = IncrementalDecoder(codec, prefix, skip_special_tokens=True)
    assert stream.push(IDS[f"{META}Haus"]) == " Haus"


def test_special_tokens_alone_leave_the_first_word_without_its_space(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer())
    codec = EncoderDecoderCodec(path, FACTS)
    stream = IncrementalDecoder(codec, codec.decoder_prefix("de"), skip_special_tokens=True)
    assert stream.push(IDS[f"{META}Haus"], IDS["es"]) == "Hauses"
