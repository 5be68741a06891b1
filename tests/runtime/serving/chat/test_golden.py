"""Conversations in ten published shapes and one more, rendered as Transformers renders them."""

from __future__ import annotations

import pytest
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.tokenizer import TokenizersCodec

from tests.runtime.serving.chat.shapes import SHAPES, golden_of, template_of

MAX_BYTES = 1 << 20


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def encoder_of(name: str) -> ChatEncoder:
    shape = SHAPES[name]
    codec = TokenizersCodec(shape.tokenizer().to_str().encode())
    return ChatEncoder(shape.files(template_of(name)), codec)


def test_texts_and_ids_are_those_of_transformers(name: str) -> None:
    encoder = encoder_of(name)
    stored = golden_of(name)
    assert len(stored) == len(SHAPES[name].cases)
    for case, wanted in zip(SHAPES[name].cases, stored, strict=True):
        if "refused" in wanted:
            with pytest.raises(RequestError, match=r"chat\.messages: ") as refusal:
                encoder.encode(case.params(), MAX_BYTES)
            assert wanted["refused"] in refusal.value.rule
        else:
            assert encoder.render(case.params(), MAX_BYTES) == wanted["text"]
            assert list(encoder.encode(case.params(), MAX_BYTES)) == wanted["ids"]


def test_what_people_write_makes_no_control_token(name: str) -> None:
    """Each hostile conversation has as many control tokens as the same one of harmless words."""
    encoder, shape = encoder_of(name), SHAPES[name]
    tokenizer = shape.tokenizer()
    control = {tokenizer.token_to_id(one) for one in shape.control}
    cases = [case for case in shape.cases if case.is_hostile]
    assert cases
    for case in cases:
        ids = encoder.encode(case.params(), MAX_BYTES)
        naive = tokenizer.encode(encoder.render(case.params(), MAX_BYTES), add_special_tokens=False)
        found = sum(one in control for one in ids)
        assert found <= sum(one in control for one in naive.ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
            naive.ids, skip_special_tokens=False
        )
        assert ids != tuple(naive.ids)
