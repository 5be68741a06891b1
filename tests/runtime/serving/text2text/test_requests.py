"""Callers and a model with an encoder, over the wire: its answers are the source's letters, each a few further on."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from outrider import CallError
from outrider.engines.base import FloatArray
from outrider.engines.bundle.encoder_decoder import LANGUAGE, TEXT, EncoderDecoder
from outrider.runtime.serving.requests.defaults import RequestDefaults
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec
from outrider.v1 import inference_pb2 as wire
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.runtime.conftest import ALPHABET, EOS, Running, Start

PAD, EN, DE, FR, UNKNOWN = range(EOS + 1, EOS + 6)
SPECIAL = ("</s>", "<pad>", "<en>", "<de>", "<fr>", "<unk>")
IDS = {token: index for index, token in enumerate((*ALPHABET, *SPECIAL))}
MAX_SOURCE, MAX_CONTEXT = 12, 20
FACTS = EncoderDecoder(
    decoder_prefix=(PAD, LANGUAGE),
    source_template=(LANGUAGE, TEXT, EOS),
    languages={"en": EN, "de": DE, "fr": FR},
    default_source_language="en",
    banned_token_ids=(PAD,),
    generation_defaults={"num_beams": 2, "max_length": 9},
)


def codec() -> EncoderDecoderCodec:
    """A token per letter."""
    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*SPECIAL])
    return EncoderDecoderCodec(made.to_str().encode(), FACTS)


def translated(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
    """One letter further in German, two in French; but for the ban, padding would always be likelier."""
    letters = [token for token in source if token < 26]
    place = len(prefix) - 2
    logits = np.zeros(len(IDS), dtype=np.float32)
    following = (letters[place] + prefix[1] - EN) % 26 if place < len(letters) else EOS
    logits[following], logits[PAD] = 9.0, 20.0
    return logits


def often_right(source: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
    """The draft takes every fourth letter for a z."""
    logits = translated(source, prefix)
    logits[25] += 20.0 * (len(prefix) % 4 == 0)
    return logits


@pytest.fixture
def start_text2text(start: Start) -> Any:
    def begin(**options: Any) -> AbstractAsyncContextManager[Running]:
        return start(
            codec=codec(),
            target=translated,
            draft=often_right,
            vocab_size=len(IDS),
            max_source=MAX_SOURCE,
            max_context=MAX_CONTEXT,
            banned_token_ids=FACTS.banned_token_ids,
            **options,
        )

    return begin


async def answer(
    running: Running, prompt: str | list[int], **options: Any
) -> tuple[str, wire.Finish]:
    text, finish = "", wire.Finish()
    async for chunk in running.client.generate(prompt, temperature=0.0, **options):
        text += chunk.text
        finish = chunk.finish
    return text, finish


async def refusal(running: Running, prompt: str | list[int], **options: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await answer(running, prompt, **options)
    return caught.value


async def test_the_answer_is_the_sources_in_the_target_language(start_text2text) -> None:
    async with start_text2text() as running:
        german, finish = await answer(running, "abcdefgh", target_language="de")
        french, _ = await answer(running, "abcdefgh", target_language="fr", source_language="de")
        ids = [EN, 0, 1, 2, EOS]
        of_ids, _ = await answer(running, ids, target_language="de")
    assert (german, french, of_ids) == ("bcdefghi", "cdefghij", "bcd")
    # Language and end are tokens of the source; the answer has its end.
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (10, 9)
    assert finish.reason == wire.FINISH_REASON_STOP_TOKEN
    assert 0 < finish.speculation.num_accepted < finish.speculation.num_drafted


async def test_the_command_asks_likewise(start_text2text) -> None:
    async with start_text2text() as running:
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.runtime.cli", "generate", "--prompt", "abcd"),
            *("--address", running.address, "--temperature", "0"),
            *("--source-language", "en", "--target-language", "fr", "--answer-prefix", "cd"),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await command.communicate()
    assert (command.returncode, out.decode().strip()) == (0, "ef")


@pytest.mark.parametrize("prefix", [{"answer_prefix": "bc"}, {"answer_prefix_tokens": [1, 2]}])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["one", "beams"])
async def test_an_answer_goes_on_from_its_prefix(start_text2text, prefix, options) -> None:
    async with start_text2text() as running:
        text, finish = await answer(running, "abcd", target_language="de", **prefix, **options)
    assert text == "de"
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (6, 3)


async def test_requests_side_by_side_have_their_own_sources(start_text2text) -> None:
    words = ["abcde", "x", "hello", "zzzzzzzzzz", "outrider", "ab"]
    async with start_text2text(max_batch=3) as running:
        found = await asyncio.gather(
            *(answer(running, word, target_language="de") for word in words)
        )
    expected = ["".join(ALPHABET[(ord(one) - 96) % 26] for one in word) for word in words]
    assert [text for text, _ in found] == expected


@pytest.mark.parametrize(
    ("prompt", "options", "reason", "field"),
    [
        ("a", {}, "INVALID_PARAMETER", "target_language"),
        ("a", {"target_language": "xx"}, "INVALID_PARAMETER", "target_language"),
        (
            "a",
            {"target_language": "de", "source_language": "xx"},
            "INVALID_PARAMETER",
            "source_language",
        ),
        (
            [EN, 3],
            {"target_language": "de", "source_language": "en"},
            "INVALID_PARAMETER",
            "source_language",
        ),
        ([], {"target_language": "de"}, "INVALID_PARAMETER", "prompt"),
        ([3] * 13, {"target_language": "de"}, "CONTEXT_LENGTH_EXCEEDED", "prompt"),
        # Eleven letters, a language and an end.
        ("a" * 11, {"target_language": "de"}, "CONTEXT_LENGTH_EXCEEDED", "prompt"),
        (
            "a",
            {"target_language": "de", "max_tokens": 19},
            "CONTEXT_LENGTH_EXCEEDED",
            "max_tokens",
        ),
        (
            "a",
            {"target_language": "de", "answer_prefix": "a" * 18},
            "CONTEXT_LENGTH_EXCEEDED",
            "answer_prefix",
        ),
        *(
            (
                "a",
                {"target_language": "de", "answer_prefix_tokens": [3] * length},
                "CONTEXT_LENGTH_EXCEEDED",
                "answer_prefix_tokens.ids",
            )
            for length in (18, 19, 21, 400)
        ),
        (
            "a",
            {"target_language": "de", "answer_prefix_tokens": [PAD]},
            "INVALID_PARAMETER",
            "answer_prefix_tokens.ids",
        ),
        (
            "a",
            {"target_language": "de", "answer_prefix": "<pad>"},
            "INVALID_PARAMETER",
            "answer_prefix",
        ),
        (
            "a",
            {"target_language": "de", "allowed_token_ids": [PAD]},
            "INVALID_PARAMETER",
            "sampling.allowed_token_ids",
        ),
    ],
)
async def test_what_the_model_cannot_take_is_refused_by_name(
    start_text2text, prompt, options, reason, field
) -> None:
    async with start_text2text() as running:
        error = await refusal(running, prompt, **options)
        at_most, _ = await answer(running, "a" * 10, target_language="de", max_tokens=18)
    assert (error.reason, [one.field for one in error.violations]) == (reason, [field])
    assert at_most == "b" * 10


@pytest.mark.parametrize(
    "option",
    [
        {"source_language": "en"},
        {"target_language": "de"},
        {"answer_prefix": "a"},
        {"answer_prefix_tokens": [3]},
    ],
)
async def test_a_decoder_only_server_refuses_each_option_by_name(start, option) -> None:
    async with start() as running:
        error = await refusal(running, "ab", **option)
        info = await running.client.info()
    assert error.reason == "UNSUPPORTED_OPTION"
    assert [one.field for one in error.violations] == [*option]
    assert not info.HasField("text_to_text")
    assert info.limits.max_source_tokens == 0


async def test_what_is_served_is_told(start_text2text) -> None:
    async with start_text2text() as running:
        info = await running.client.info()
    assert (info.limits.max_source_tokens, info.limits.max_context) == (MAX_SOURCE, MAX_CONTEXT)
    assert info.text_to_text == wire.TextToTextInfo(
        languages={"en": EN, "de": DE, "fr": FR},
        default_source_language="en",
        has_source_language=True,
        has_target_language=True,
        decoder_prefix=[wire.PrefixToken(id=PAD), wire.PrefixToken()],
        banned_token_ids=[PAD],
        generation_defaults_json='{"max_length": 9, "num_beams": 2}',
    )


async def test_generation_defaults_are_those_of_requests_where_the_server_says_so(
    start_text2text,
) -> None:
    defaults = RequestDefaults(search={"num_beams": 2}, bad_words=((1,),))
    async with start_text2text(defaults=defaults) as running:
        chunks = [one async for one in running.client.generate("abc", target_language="de")]
        plain, finish = await answer(
            running, "bcd", target_language="de", num_beams=1, bad_words=["x"]
        )
        info = await running.client.info()
    assert chunks[-1].finish.beams
    # The b is banned, as a bad word.
    assert not chunks[-1].text.startswith("b")
    assert (plain, [*finish.beams]) == ("cde", [])
    assert info.text_to_text.applies_generation_defaults


async def test_tokenize_gives_what_generate_would_see(start_text2text, start) -> None:
    async with start_text2text() as running:
        client = running.client
        assert await client.tokenize("ab") == [EN, 0, 1, EOS]
        assert await client.tokenize("ab", source_language="fr") == [FR, 0, 1, EOS]
        assert await client.tokenize("ab", add_special_tokens=False) == [0, 1]
        assert await client.tokenize("ab", target=True) == [0, 1]
        for options, field in (
            ({"target": True, "add_special_tokens": True}, "add_special_tokens"),
            ({"target": True, "source_language": "de"}, "source_language"),
            ({"add_special_tokens": False, "source_language": "de"}, "source_language"),
            ({"source_language": "xx"}, "source_language"),
        ):
            with pytest.raises(CallError) as caught:
                await client.tokenize("ab", **options)
            assert [one.field for one in caught.value.violations] == [field]
    async with start() as running:
        for options in ({"target": True}, {"source_language": "de"}):
            with pytest.raises(CallError) as caught:
                await running.client.tokenize("ab", **options)
            assert caught.value.reason == "UNSUPPORTED_OPTION"
            assert [one.field for one in caught.value.violations] == [*options]


async def test_reads_are_counted(start_text2text, start) -> None:
    async with start_text2text() as running:
        for word in ("abc", "abcdef"):
            await answer(running, word, target_language="de")
        value = running.server.metrics.registry.get_sample_value
        assert value("outrider_prompt_tokens_total") == 13
        assert value("outrider_source_tokens_total") == 13
        assert value("outrider_num_requests_reading") == 0
        assert value("outrider_read_seconds_count") == 2
        assert value("outrider_read_seconds_bucket", {"le": "+Inf"}) == 2
        assert value("outrider_read_seconds_sum") > 0
    async with start() as running:
        registry = running.server.metrics.registry
        assert registry.get_sample_value("outrider_source_tokens_total") is None
