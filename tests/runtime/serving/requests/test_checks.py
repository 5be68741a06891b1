"""Whatever arrives, it is refused by name or becomes a request that every engine can run."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider import build_request
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.rules import check_abort_ids, check_text
from outrider.runtime.core.errors import (
    ContextTooLong,
    ModelNotFound,
    RequestError,
    UnsupportedOption,
)
from outrider.runtime.core.params import BeamParams, RequestSpec
from outrider.runtime.serving.requests import checks
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.checks import check_request
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.requests.fields import FIELDS, NESTED
from outrider.runtime.serving.requests.spec import Admission, EncodedTexts, build_spec
from outrider.v1 import inference_pb2 as wire

LIMITS = RequestLimits()
MODEL = ServedModel(
    name="m",
    vocab_size=50,
    max_context=100,
    max_gamma=4,
    eos_token_ids=(2,),
    drafters=("model", "lookup", "none"),
    max_beams=4,
)
RULES = RequestRules(LIMITS, MODEL)
ADMISSION = Admission(internal_id="i", seed=7, deadline_s=9.0, client=ClientIdentity())
TEXTS = EncodedTexts(prompt=(1, 2, 3))


def asked(prompt: Any = (1, 2, 3), **options: Any) -> wire.GenerateRequest:
    return build_request([*prompt] if isinstance(prompt, tuple) else prompt, **options)


def check(
    request: wire.GenerateRequest,
    model: ServedModel = MODEL,
    defaults: RequestDefaults = NO_DEFAULTS,
) -> None:
    check_request(request, defaults.fill(request), RequestRules(LIMITS, model))


def built(
    request: wire.GenerateRequest, texts: EncodedTexts = TEXTS, model: ServedModel = MODEL
) -> RequestSpec:
    return build_spec(request, texts, ADMISSION, RequestRules(LIMITS, model), NO_DEFAULTS)


def option(path: str, value: Any) -> dict[str, Any]:
    part, _, name = path.partition(".")
    return (
        {part: {name: value}} if part == "speculation" else {path.removeprefix("sampling."): value}
    )


any_float = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
any_id = st.integers(0, 60)
ids = st.lists(any_id, max_size=4)
requests = st.fixed_dictionaries(
    {"prompt": st.lists(any_id, max_size=110)},
    optional={
        "temperature": any_float,
        "top_k": st.integers(0, 60),
        "top_p": any_float,
        "min_p": any_float,
        "repetition_penalty": any_float,
        "presence_penalty": any_float,
        "frequency_penalty": any_float,
        "logit_bias": st.dictionaries(any_id, any_float, max_size=3),
        "allowed_token_ids": ids,
        "min_tokens": st.integers(0, 110),
        "no_repeat_ngram_size": st.integers(0, 11),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(0, 5000),
        "stop": st.lists(st.text(max_size=3), max_size=9),
        "stop_token_ids": ids,
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 30),
        "prompt_logprobs": st.integers(0, 7),
        "echo": st.booleans(),
        "speculation": st.fixed_dictionaries(
            {},
            optional={
                "enabled": st.booleans(),
                "drafter": st.sampled_from(["", "model", "none", "lookup"]),
                "gamma": st.integers(0, 6),
                "mode": st.sampled_from([*ExactnessMode]),
                "lenience": any_float,
                "block_verification": st.booleans(),
                "beam_width": st.integers(0, 6),
            },
        ),
        "num_beams": st.integers(0, 6),
        "n": st.integers(0, 6),
        "length_penalty": any_float,
        "early_stopping": st.booleans(),
        "exhaustive_search": st.booleans(),
    },
)


def is_sound_law(params: SamplingParams) -> bool:
    tokens = [
        *params.allowed_token_ids,
        *params.end_token_ids,
        *(token for token, _ in params.logit_bias),
    ]
    return (
        (params.temperature == 0 or 0.01 <= params.temperature <= 2)
        and 0 <= params.top_k < 50
        and 0 < params.top_p <= 1
        and 0 <= params.min_p <= 1
        and 0.01 <= params.repetition_penalty <= 2
        and abs(params.presence_penalty) <= 2
        and abs(params.frequency_penalty) <= 2
        and params.no_repeat_ngram_size <= 10
        and all(abs(bias) <= 100 for _, bias in params.logit_bias)
        and all(0 <= token < 50 for token in tokens)
    )


def test_every_field_of_the_wire_has_one_row():
    described = wire.GenerateRequest.DESCRIPTOR
    paths = {field.name for field in described.fields} - {*NESTED}
    for part in NESTED:
        message = described.fields_by_name[part].message_type
        paths |= {f"{part}.{field.name}" for field in message.fields}
    assert {*FIELDS} == paths


@given(requests)
def test_refused_by_name_or_within_every_bound(options):
    request = asked(**options)
    try:
        check(request)
        spec = built(request, EncodedTexts(prompt=tuple(options["prompt"])))
    except RequestError as error:
        assert error.field and error.rule
        return
    assert is_sound_law(spec.params)
    assert spec.prompt_tokens and all(token < 50 for token in spec.prompt_tokens)
    assert spec.max_tokens >= 1 or spec.echoes_prompt or spec.num_prompt_logprobs is not None
    assert spec.num_prompt_logprobs is None or 0 <= spec.num_prompt_logprobs <= 5
    assert len(spec.prompt_tokens) + spec.max_tokens <= 100
    assert (2 in spec.params.end_token_ids) is (
        not request.ignore_eos or 2 in request.stop_token_ids
    )
    assert set(request.stop_token_ids) <= set(spec.params.end_token_ids)
    assert spec.params.min_tokens <= spec.max_tokens
    assert spec.speculation.gamma is None or spec.speculation.gamma <= 4
    assert 0 < spec.speculation.lenience <= 1
    assert 1 <= spec.num_slots <= 4
    if spec.beams is not None:
        assert 1 <= spec.beams.num_results <= spec.beams.num_beams <= spec.num_slots
        assert abs(spec.beams.length_penalty) <= 10 and spec.params.temperature == 0
        assert not spec.stop_strings and spec.num_logprobs is spec.num_prompt_logprobs is None
    banned = set(spec.params.end_token_ids) if spec.params.min_tokens else set()
    assert set(spec.params.allowed_token_ids or range(50)) - banned


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": wire.GenerateRequest()}, "prompt"),
        ({"prompt": (50,)}, "tokens.ids"),
        ({"prompt": "é" * (1 << 19) + "e"}, "text"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"priority": 101}, "priority"),
        ({"stop": ["é" * 129]}, "stop"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"bad_words": [""]}, "sampling.bad_words"),
        ({"bad_words": ["x"] * 65}, "sampling.bad_words"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"max_tokens": 4097, "echo": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
        ({"temperature": 1e-9}, "sampling.temperature"),
        ({"top_k": 50}, "sampling.top_k"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"no_repeat_ngram_size": 11}, "sampling.no_repeat_ngram_size"),
        ({"top_n_sigma": float("nan")}, "sampling.top_n_sigma"),
        ({"speculation": {"lenience": 0.5}}, "speculation.lenience"),
        ({"speculation": {"gamma": 5}}, "speculation.gamma"),
        ({"speculation": {"mode": 9}}, "speculation.mode"),
    ],
)
def test_one_step_beyond_each_bound(options, field):
    with pytest.raises(RequestError) as caught:
        check(asked(**options))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": (0, 49)},
        {"request_id": "aZ09._:-" * 16},
        {"cache_salt": "a" * 128},
        {"priority": -100},
        {"stop": ["é" * 128] * 8},
        {"seed": 2**64 - 1},
        {"max_tokens": 4096},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 0, "prompt_logprobs": 5},
        {"n": 4},
        {"temperature": 0.01, "top_k": 49, "top_p": 1e-9, "repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 10},
        {"speculation": {"lenience": 0.5, "mode": "lenient"}},
    ],
)
def test_the_bounds_themselves_are_allowed(options):
    check(asked(**options))


def test_unsupported_options_and_other_models():
    for options in ({"best_of": 2}, {"adapter": "a"}):
        with pytest.raises(UnsupportedOption) as caught:
            check(asked(**options))
        assert caught.value.field == next(iter(options))
    with pytest.raises(ModelNotFound):
        check(asked(model="other"))
    check(asked(model="m", best_of=1))
    check(asked(n=2, best_of=2))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("length_penalty", 0.5),
        ("early_stopping", True),
        ("exhaustive_search", True),
    ],
)
def test_what_beams_have_is_refused_without_them(path, value):
    with pytest.raises(UnsupportedOption, match="needs num_beams") as caught:
        check(asked(**option(path, value)))
    assert caught.value.field == path


def test_beams_go_with_bans_and_with_the_draft_model():
    request = asked(
        num_beams=3,
        allowed_token_ids=[3, 4, 9],
        bad_words=["a"],
        min_tokens=2,
        no_repeat_ngram_size=3,
        seed=3,
        stop_token_ids=[9],
        length_penalty=-0.5,
        early_stopping=True,
        temperature=0.0,
        top_p=1.0,
        speculation={"drafter": "model", "mode": "seed_stable"},
    )
    check(request)
    spec = built(request, replace(TEXTS, bad_words=((4,),)))
    assert spec.beams == BeamParams(num_beams=3, length_penalty=-0.5, stops_early=True)
    assert (spec.num_slots, spec.params.temperature) == (3, 0.0)


NOT_WITH_BEAMS = {
    "sampling.temperature": 1.0,
    "sampling.top_k": 3,
    "sampling.top_p": 0.5,
    "sampling.min_p": 0.5,
    "sampling.top_n_sigma": 1.0,
    "sampling.repetition_penalty": 1.1,
    "sampling.presence_penalty": 1.0,
    "sampling.frequency_penalty": 1.0,
    "sampling.logit_bias": {1: 2.0},
    "stop": ["a"],
    "logprobs": 0,
    "prompt_logprobs": 0,
    "echo": True,
    "return_trace": True,
    "return_provenance": True,
    "speculation.mode": "lenient",
    "speculation.adaptive": True,
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *NOT_WITH_BEAMS.items(),
        ("num_beams", 0),
        ("num_beams", 5),
        ("n", 4),
        ("n", 0),
        ("length_penalty", float("nan")),
        ("length_penalty", 11.0),
        ("speculation.beam_width", 2),
        ("exhaustive_search", True),
        ("speculation.drafter", "lookup"),
        ("speculation.drafter", "model+lookup"),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused_by_name(path, value):
    model = replace(MODEL, can_adapt=True)
    search = {"num_beams": 3, "early_stopping": path == "exhaustive_search"}
    check(asked(**search), model)
    with pytest.raises(RequestError) as caught:
        check(asked(**search | option(path, value)), model)
    assert caught.value.field == path


def test_every_field_that_shapes_a_draw_is_tried_with_a_search():
    never = {path for path, field in FIELDS.items() if field.search.name in ("NEVER", "UNTOLD")}
    assert never <= {*NOT_WITH_BEAMS}


def test_more_results_than_a_default_search_has_name_that_default():
    defaults = RequestDefaults(search={"num_beams": 2})
    with pytest.raises(
        RequestError, match=r"^n: must be in \[1, 2\] with num_beams \(the server's"
    ):
        check(asked(n=3), defaults=defaults)


@pytest.mark.parametrize(
    ("num_prompt", "options"), [(100, {}), (101, {}), (60, {"max_tokens": 41})]
)
def test_what_does_not_fit_the_context(num_prompt, options):
    with pytest.raises(ContextTooLong) as caught:
        built(asked(**options), EncodedTexts(prompt=(1,) * num_prompt))
    assert caught.value.given > caught.value.limit


def test_max_tokens_defaults_to_what_the_context_has_left():
    texts = EncodedTexts(prompt=(1,) * 99)
    assert built(asked(), texts).max_tokens == 1
    wide = replace(MODEL, max_context=1000)
    assert built(asked(), texts, wide).max_tokens == 256


@pytest.mark.parametrize(
    ("options", "bad_words", "is_drawable"),
    [
        ({"allowed_token_ids": [2], "min_tokens": 1}, None, False),
        ({"allowed_token_ids": [2]}, None, True),
        ({"allowed_token_ids": [2, 3], "min_tokens": 1}, ((3,),), False),
        ({"allowed_token_ids": [3, 4]}, ((3,),), True),
        ({}, tuple((token,) for token in range(50)), False),
    ],
)
def test_parameters_without_a_token_to_draw_are_refused(options, bad_words, is_drawable):
    texts = replace(TEXTS, bad_words=bad_words)
    if is_drawable:
        built(asked(**options), texts)
    else:
        with pytest.raises(RequestError):
            built(asked(**options), texts)


def test_texts_and_aborts():
    check_text("text", "a" * (1 << 20), 1 << 20)
    with pytest.raises(RequestError):
        check_text("text", "a" * ((1 << 20) + 1), 1 << 20)
    check_abort_ids(["a"], LIMITS.max_abort_ids)
    for request_ids in ([], ["a"] * 257, ["bad id"]):
        with pytest.raises(RequestError):
            check_abort_ids(request_ids, LIMITS.max_abort_ids)


# --- models with an encoder


WITH_ENCODER = replace(
    MODEL,
    max_source=30,
    source_vocab_size=70,
    shares_vocabulary=False,
    banned_token_ids=(1,),
    max_token_bytes=4,
)
OF_SOURCE = EncodedTexts(prompt=(3, 69), decoder_prefix=(1, 9))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("source_language", "en"),
        ("target_language", "de"),
        ("answer_prefix", "a"),
        ("answer_prefix_tokens", [3]),
    ],
)
def test_what_encoders_have_is_refused_without_one(path, value):
    with pytest.raises(UnsupportedOption, match="needs a model with an encoder") as caught:
        check(asked("a", **{path: value}))
    assert caught.value.field == path
    check(asked("a", **{path: value}), WITH_ENCODER)


@pytest.mark.parametrize(("path", "value"), [("echo", True), ("prompt_logprobs", 1)])
def test_what_scores_a_prompt_is_refused_of_sources(path, value):
    with pytest.raises(UnsupportedOption, match="needs a model without an encoder") as caught:
        check(asked("a", **{path: value}), WITH_ENCODER)
    assert caught.value.field == path


def test_the_text_begins_with_the_decoder_prefix_and_the_requests_own():
    request = asked((3, 69), answer_prefix_tokens=[5, 6])
    check(request, WITH_ENCODER)
    spec = built(
        request, replace(OF_SOURCE, answer_prefix=(5, 6), bad_words=((7, 8),)), WITH_ENCODER
    )
    assert spec.source_tokens == (3, 69)
    assert spec.prompt_tokens == (1, 9, 5, 6)
    assert spec.num_prompt_tokens == 2
    assert not spec.source_is_quotable
    # The prefix may begin with what an answer must not have.
    assert spec.params.bad_words == ((7, 8), (1,))
    assert spec.max_tokens == 96
    plain = built(asked())
    assert (plain.source_tokens, plain.num_prompt_tokens, plain.params.bad_words) == ((), 3, ())


@pytest.mark.parametrize(
    ("options", "field", "rule"),
    [
        ({"prompt": (70,)}, "tokens.ids", "[0, 70)"),
        ({"prompt": (3,) * 31}, "prompt", "at most 30 tokens, max_source_tokens of this server"),
        # 31 tokens at least.
        ({"prompt": "a" * 121}, "prompt", "max_source_tokens"),
        ({"source_language": "en"}, "source_language", "left out with tokens"),
        ({"answer_prefix_tokens": [50]}, "answer_prefix_tokens.ids", "[0, 50)"),
        ({"answer_prefix": "e" * ((1 << 20) + 1)}, "answer_prefix", "bytes"),
    ],
)
def test_sources_and_prefixes_are_refused_before_texts_are_tokenised(options, field, rule):
    with pytest.raises(RequestError) as caught:
        check(asked(**options), WITH_ENCODER)
    assert caught.value.field == field
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("options", "texts", "error", "field"),
    [
        ({}, {"prompt": ()}, RequestError, "prompt"),
        ({}, {"prompt": (3,) * 31}, ContextTooLong, "prompt"),
        ({}, {"prompt": (70,)}, RequestError, "prompt"),
        ({}, {"answer_prefix": (4, 1)}, RequestError, "answer_prefix"),
        (
            {"answer_prefix_tokens": [1]},
            {"answer_prefix": (1,)},
            RequestError,
            "answer_prefix_tokens.ids",
        ),
        ({}, {"answer_prefix": (50,)}, RequestError, "answer_prefix"),
        ({}, {"answer_prefix": (3,) * 98}, ContextTooLong, "answer_prefix"),
        ({"max_tokens": 99}, {}, ContextTooLong, "max_tokens"),
        ({"allowed_token_ids": [1]}, {}, RequestError, "sampling.allowed_token_ids"),
    ],
)
def test_sources_and_prefixes_are_refused_by_name_once_tokenised(options, texts, error, field):
    with pytest.raises(error) as caught:
        built(asked(**options), replace(OF_SOURCE, **texts), WITH_ENCODER)
    assert caught.value.field == field


def test_the_bounds_of_sources_and_prefixes_are_allowed():
    texts = replace(OF_SOURCE, prompt=(3,) * 30, answer_prefix=(3,) * 97)
    assert built(asked(), texts, WITH_ENCODER).max_tokens == 1
    assert built(asked(max_tokens=98), OF_SOURCE, WITH_ENCODER).max_tokens == 98
    check(asked("a" * 120), WITH_ENCODER)


def test_a_default_of_min_tokens_refuses_nobody():
    defaults = RequestDefaults(min_tokens=40)
    for options, least in (({"max_tokens": 10}, 10), ({}, 40), ({"min_tokens": 3}, 3)):
        spec = build_spec(asked(**options), TEXTS, ADMISSION, RULES, defaults)
        assert spec.params.min_tokens == least


def test_lists_are_counted_before_anything_looks_into_them(monkeypatch):
    monkeypatch.setattr(checks, "_check_served", None)
    for options in ({"stop_token_ids": [1] * 65}, {"stop": ["a"] * 9}, {"bad_words": ["a"] * 65}):
        with pytest.raises(RequestError, match="entries"):
            check(asked(**options))
