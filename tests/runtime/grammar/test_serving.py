"""Constraints over gRPC: schemas, expressions and grammars, and what is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import numpy as np
import pytest
from outrider import CallError
from outrider.engines.base import FloatArray
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.v1 import inference_pb2 as wire

from tests.runtime.conftest import EOS, VOCAB, Start
from tests.runtime.grammar.letters import tokenizer

CHARACTERS = (*"abcdefghij0123456789", *'{}",:', "Ġ", "[", "]")
TOKENIZER = tokenizer(CHARACTERS)
TABLE = np.random.default_rng(8).normal(size=(VOCAB, VOCAB)).astype(np.float32)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 10, "maximum": 99},
        "b": {"enum": ["ab", "ba"]},
        "c": {
            "type": "object",
            "properties": {"dd": {"const": 1}},
            "required": ["dd"],
            "additionalProperties": False,
        },
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def target_of(prefix: tuple[int, ...]) -> FloatArray:
    return TABLE[prefix[-1]]


def draft_of(prefix: tuple[int, ...]) -> FloatArray:
    return TABLE[prefix[-1]] + TABLE[prefix[-1] - 1]


def starting(start: Start, **options: Any) -> Any:
    return start(target=target_of, draft=draft_of, tokenizer=TOKENIZER, **options)


async def answer(client: Any, prompt: str = "abc", **options: Any) -> tuple[str, list[Any]]:
    """Return the text of a completion, and its responses."""
    responses = [one async for one in client.generate(prompt, **{"max_tokens": 80, **options})]
    return "".join(one.text for one in responses), responses


async def test_an_answer_has_its_schema_and_few_passes(start: Start) -> None:
    async with starting(start) as running:
        for drafter, temperature in (("none", 0.0), ("model", 1.0)):
            text, responses = await answer(
                running.client,
                json_schema=json.dumps(SCHEMA),
                disable_any_whitespace=True,
                temperature=temperature,
                seed=3,
                speculation={"drafter": drafter, "gamma": 3},
                return_provenance=True,
                return_trace=True,
            )
            value = json.loads(text)
            assert set(value) == {"a", "b", "c"}
            assert 10 <= value["a"] <= 99
            assert value["b"] in ("ab", "ba")
            assert value["c"] == {"dd": 1}
            assert " " not in text
            finish = responses[-1].finish
            assert finish.reason == wire.FINISH_REASON_STOP_TOKEN
            tokens = [token for one in responses for token in one.tokens]
            forced = [t for t in tokens if t.provenance == wire.PROVENANCE_FORCED]
            assert len(forced) == finish.speculation.num_forced
            assert len(tokens) == finish.usage.output_tokens == len(text) + 1
            steps = [step for one in responses for step in one.steps]
            assert len(steps) <= 0.3 * len(tokens)
            assert [t for step in steps for t in step.forced] == [t.id for t in forced]
            assert steps[0].forced_text[0] == text[1]
        name = "outrider_forced_tokens_total"
        assert running.server.metrics.registry.get_sample_value(name) >= 2 * len(forced) - 2


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": r"(ab|ba){2,3}\d"}, r"(ab|ba){2,3}\d"),
        ({"grammar": 'start: "[" item ("," item)~2 "]"\nitem: /[a-c]+[0-9]/'}, r"\[[^]]+\]"),
        ({"json_schema": '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}'},
         r"\[\s*[12]\s*(,\s*[12]\s*){1,2}\]"),
    ],
)  # fmt: skip
async def test_every_kind_of_form_is_held_beside_a_neighbour_without(
    start: Start, options: dict[str, str], pattern: str
) -> None:
    async with starting(start) as running:
        sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
        free, _ = await answer(running.client, "de", **sampling)
        alone, responses = await answer(running.client, **sampling, **options)
        if responses[-1].finish.reason == wire.FINISH_REASON_STOP_TOKEN:
            assert re.fullmatch(pattern, alone)
        again, _ = await answer(running.client, **sampling, **options)
        assert again == alone
        assert (await answer(running.client, "de", **sampling))[0] == free


async def test_each_of_several_completions_has_the_form(start: Start) -> None:
    async with starting(start) as running:
        sampling = {"regex": "(ab|ba){2}[0-9]", "temperature": 1.0, "seed": 5, "n": 3}
        _, responses = await answer(running.client, **sampling)
        texts = ["".join(one.text for one in responses if one.index == i) for i in range(3)]
        assert all(re.fullmatch("(ab|ba){2}[0-9]", text) for text in texts)
        assert len({*texts}) > 1


async def test_a_server_says_which_forms_it_serves(start: Start) -> None:
    async with starting(start) as running:
        info = await running.client.info()
        assert list(info.constraints) == ["json_schema", "regex", "grammar"]
        assert info.limits.max_grammar_bytes == RequestLimits().max_grammar_bytes
    async with start() as running:
        assert not (await running.client.info()).constraints


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a", "grammar": "start: /a/"}, "grammar: must be left out with regex"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace: needs json_schema"),
    ({"disable_any_whitespace": True}, "disable_any_whitespace: needs json_schema"),
    ({"regex": "a" * 8193}, "regex: must be at most 8192 bytes"),
    ({"regex": "a(b"}, "regex: unclosed group"),
    (
        {"json_schema": '{"not": {}}'},
        'json_schema: cannot keep not; leave it out, or say "x-guidance": {"lenient": true}',
    ),
    ({"json_schema": "{"}, "json_schema: must be JSON"),
    ({"grammar": "rubbish"}, "grammar: "),
    ({"regex": "a", "num_beams": 2, "temperature": 0.0}, "regex: must be left out with num_beams"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos: must be left out with regex"),
]


async def test_what_cannot_be_served_is_refused_by_name(start: Start) -> None:
    async with starting(start) as running:
        for options, message in BAD:
            with pytest.raises(CallError, match=re.escape(message)) as refused:
                await answer(running.client, **options)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert len(str(refused.value)) < 300
    async with start() as running:
        with pytest.raises(CallError, match="regex: is not supported") as refused:
            await answer(running.client, regex="a")
        assert refused.value.reason == "UNSUPPORTED_OPTION"


async def test_a_form_that_the_request_forbids_is_a_conflict(start: Start) -> None:
    async with starting(start) as running:
        with pytest.raises(CallError) as refused:
            await answer(running.client, regex="abc", allowed_token_ids=[0, EOS])
        assert refused.value.reason == "CONSTRAINT_CONFLICT"
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
