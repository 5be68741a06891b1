"""Whatever arrives, it is refused by name or becomes a request that every engine can run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.checks.fields import Admission, GenerateFields
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.options import check_abort_ids, check_text
from outrider.runtime.core.checks.validate import build_spec, check_fields
from outrider.runtime.core.errors import (
    ContextTooLong,
    ModelNotFound,
    RequestError,
    UnsupportedOption,
)
from outrider.runtime.core.params import BeamParams, SpeculationParams

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
FIELDS = GenerateFields(tokens=(1, 2, 3))
ADMISSION = Admission(
    internal_id="i", request_id="r", prompt_tokens=(1, 2, 3), bad_words=(), seed=7, deadline_s=None
)

any_float = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
any_id = st.integers(0, 60)
ids = st.lists(any_id, max_size=4).map(tuple)
laws = st.builds(
    SamplingParams,
    temperature=any_float,
    top_k=st.integers(0, 60),
    top_p=any_float,
    min_p=any_float,
    repetition_penalty=any_float,
    presence_penalty=any_float,
    frequency_penalty=any_float,
    logit_bias=st.lists(st.tuples(any_id, any_float), max_size=3).map(tuple),
    allowed_token_ids=ids,
    min_tokens=st.integers(0, 110),
    no_repeat_ngram_size=st.integers(0, 11),
)
speculations = st.builds(
    SpeculationParams,
    is_enabled=st.booleans(),
    drafter=st.sampled_from([None, "model", "none", "lookup"]),
    gamma=st.none() | st.integers(0, 6),
    mode=st.sampled_from(ExactnessMode),
    lenience=any_float,
    verifies_block=st.none() | st.booleans(),
)
requests = st.builds(
    GenerateFields,
    tokens=st.lists(any_id, max_size=110).map(tuple),
    params=laws,
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(0, 5000),
    stop_strings=st.lists(st.text(max_size=3), max_size=9).map(tuple),
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(0, 30),
    num_prompt_logprobs=st.none() | st.integers(0, 7),
    echoes_prompt=st.booleans(),
    speculation=speculations,
    beams=st.none()
    | st.builds(
        BeamParams,
        num_beams=st.integers(0, 6),
        num_results=st.integers(0, 6),
        length_penalty=any_float,
        stops_early=st.booleans(),
        is_exhaustive=st.booleans(),
        width=st.integers(0, 6),
    ),
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


@given(requests)
def test_refused_by_name_or_within_every_bound(fields):
    admission = replace(ADMISSION, prompt_tokens=fields.tokens)
    try:
        check_fields(fields, LIMITS, MODEL)
        spec = build_spec(fields, admission, LIMITS, MODEL)
    except RequestError as error:
        assert error.field and error.rule
        return
    assert is_sound_law(spec.params)
    assert spec.prompt_tokens and all(token < 50 for token in spec.prompt_tokens)
    assert spec.max_tokens >= 1 or spec.echoes_prompt or spec.num_prompt_logprobs is not None
    assert spec.num_prompt_logprobs is None or 0 <= spec.num_prompt_logprobs <= 5
    assert len(spec.prompt_tokens) + spec.max_tokens <= 100
    assert (2 in spec.params.end_token_ids) is (not fields.ignore_eos or 2 in fields.stop_token_ids)
    assert set(fields.stop_token_ids) <= set(spec.params.end_token_ids)
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
    ("change", "field"),
    [
        ({"tokens": None}, "prompt"),
        ({"tokens": (50,)}, "tokens.ids"),
        ({"tokens": (-1,)}, "tokens.ids"),
        ({"text": "é" * (1 << 19) + "e"}, "text"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"stop_strings": ("é" * 129,)}, "stop"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
        ({"bad_words": ("",)}, "sampling.bad_words"),
        ({"bad_words": ("x",) * 65}, "sampling.bad_words"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"max_tokens": 4097, "echoes_prompt": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_prompt_logprobs": 6}, "prompt_logprobs"),
        ({"params": SamplingParams(logit_bias=((1, 0.0),) * 301)}, "sampling.logit_bias"),
        ({"params": SamplingParams(temperature=1e-9)}, "sampling.temperature"),
        ({"params": SamplingParams(top_k=50)}, "sampling.top_k"),
        ({"params": SamplingParams(no_repeat_ngram_size=11)}, "sampling.no_repeat_ngram_size"),
        ({"speculation": SpeculationParams(lenience=0.5)}, "speculation.lenience"),
    ],
)
def test_one_step_beyond_each_bound(change, field):
    with pytest.raises(RequestError) as caught:
        check_fields(replace(FIELDS, **change), LIMITS, MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (0, 49)},
        {"request_id": "aZ09._:-" * 16},
        {"stop_strings": ("é" * 128,) * 8},
        {"seed": 2**64 - 1},
        {"max_tokens": 4096},
        {"max_tokens": 0, "echoes_prompt": True},
        {"max_tokens": 0, "num_prompt_logprobs": 5},
        {"params": SamplingParams(temperature=0.01, top_k=49, top_p=1e-9, repetition_penalty=2.0)},
        {"params": SamplingParams(no_repeat_ngram_size=10)},
        {"speculation": SpeculationParams(lenience=0.5, mode=ExactnessMode.LENIENT)},
    ],
)
def test_the_bounds_themselves_are_allowed(change):
    check_fields(replace(FIELDS, **change), LIMITS, MODEL)


def test_unsupported_options_and_other_models():
    with pytest.raises(UnsupportedOption) as caught:
        check_fields(replace(FIELDS, options={"best_of": 2}), LIMITS, MODEL)
    assert caught.value.field == "best_of"
    with pytest.raises(ModelNotFound):
        check_fields(replace(FIELDS, model="other"), LIMITS, MODEL)
    check_fields(replace(FIELDS, model="m", options={"adapter": ""}), LIMITS, MODEL)


@pytest.mark.parametrize(
    "option",
    [
        {"length_penalty": 0.5},
        {"early_stopping": True},
        {"exhaustive_search": True},
        {"speculation.beam_width": 2},
    ],
)
def test_what_beams_have_is_refused_without_them(option):
    with pytest.raises(UnsupportedOption, match="needs num_beams") as caught:
        check_fields(replace(FIELDS, options=option), LIMITS, MODEL)
    assert caught.value.field == next(iter(option))


BEAMS = replace(FIELDS, params=SamplingParams(temperature=0.0), beams=BeamParams(num_beams=3))


def test_beams_go_with_bans_and_with_the_draft_model():
    params = SamplingParams(
        temperature=0.0,
        allowed_token_ids=(3, 4, 9),
        bad_words=((4,),),
        min_tokens=2,
        no_repeat_ngram_size=3,
    )
    fields = replace(
        BEAMS,
        params=params,
        seed=3,
        stop_token_ids=(9,),
        options={"length_penalty": -0.5, "early_stopping": True},
        speculation=SpeculationParams(drafter="model", mode=ExactnessMode.SEED_STABLE),
    )
    check_fields(fields, LIMITS, MODEL)
    built = build_spec(fields, ADMISSION, LIMITS, MODEL)
    assert built.beams == BeamParams(num_beams=3)
    assert built.num_slots == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"beams": BeamParams(num_beams=0)}, "num_beams"),
        ({"beams": BeamParams(num_beams=5)}, "num_beams"),
        ({"beams": BeamParams(num_beams=3, num_results=4)}, "n"),
        ({"beams": BeamParams(num_beams=3, num_results=0)}, "n"),
        ({"beams": BeamParams(num_beams=3, length_penalty=float("nan"))}, "length_penalty"),
        ({"beams": BeamParams(num_beams=3, length_penalty=11.0)}, "length_penalty"),
        ({"beams": BeamParams(num_beams=3, width=2)}, "speculation.beam_width"),
        ({"beams": BeamParams(num_beams=3, width=5)}, "speculation.beam_width"),
        (
            {"beams": BeamParams(num_beams=3, stops_early=True, is_exhaustive=True)},
            "exhaustive_search",
        ),
        ({"params": SamplingParams()}, "sampling.temperature"),
        ({"params": SamplingParams(temperature=0.0, top_k=3)}, "sampling.top_k"),
        ({"params": SamplingParams(temperature=0.0, top_p=0.5)}, "sampling.top_p"),
        ({"params": SamplingParams(temperature=0.0, min_p=0.5)}, "sampling.min_p"),
        (
            {"params": SamplingParams(temperature=0.0, repetition_penalty=1.1)},
            "sampling.repetition_penalty",
        ),
        (
            {"params": SamplingParams(temperature=0.0, presence_penalty=1.0)},
            "sampling.presence_penalty",
        ),
        (
            {"params": SamplingParams(temperature=0.0, frequency_penalty=1.0)},
            "sampling.frequency_penalty",
        ),
        (
            {"params": SamplingParams(temperature=0.0, logit_bias=((1, 2.0),))},
            "sampling.logit_bias",
        ),
        ({"stop_strings": ("a",)}, "stop"),
        ({"num_logprobs": 0}, "logprobs"),
        ({"num_prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echoes_prompt": True}, "echo"),
        ({"options": {"return_trace": True}}, "return_trace"),
        ({"options": {"return_provenance": True}}, "return_provenance"),
        ({"speculation": SpeculationParams(mode=ExactnessMode.LENIENT)}, "speculation.mode"),
        ({"speculation": SpeculationParams(is_adaptive=True)}, "speculation.adaptive"),
        ({"speculation": SpeculationParams(drafter="lookup")}, "speculation.drafter"),
        ({"speculation": SpeculationParams(drafter="model+lookup")}, "speculation.drafter"),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused_by_name(change, field):
    model = replace(MODEL, can_adapt=True)
    check_fields(BEAMS, LIMITS, model)
    with pytest.raises(RequestError) as caught:
        check_fields(replace(BEAMS, **change), LIMITS, model)
    assert caught.value.field == field


def test_more_results_than_a_default_search_has_name_that_default():
    given = replace(BEAMS, beams=BeamParams(num_beams=2, num_results=3), has_default_beams=True)
    with pytest.raises(
        RequestError, match=r"^n: must be in \[1, 2\] with num_beams \(the server's"
    ):
        check_fields(given, LIMITS, MODEL)


@pytest.mark.parametrize(("num_prompt", "asked"), [(100, None), (101, None), (60, 41)])
def test_what_does_not_fit_the_context(num_prompt, asked):
    admission = replace(ADMISSION, prompt_tokens=(1,) * num_prompt)
    with pytest.raises(ContextTooLong) as caught:
        build_spec(replace(FIELDS, max_tokens=asked), admission, LIMITS, MODEL)
    assert caught.value.given > caught.value.limit


def test_max_tokens_defaults_to_what_the_context_has_left():
    admission = replace(ADMISSION, prompt_tokens=(1,) * 99)
    assert build_spec(FIELDS, admission, LIMITS, MODEL).max_tokens == 1
    wide = replace(MODEL, max_context=1000)
    assert build_spec(FIELDS, admission, LIMITS, wide).max_tokens == 256


@pytest.mark.parametrize(
    ("params", "bad_words", "is_drawable"),
    [
        (SamplingParams(allowed_token_ids=(2,), min_tokens=1), (), False),
        (SamplingParams(allowed_token_ids=(2,)), (), True),
        (SamplingParams(allowed_token_ids=(2, 3), min_tokens=1), ((3,),), False),
        (SamplingParams(allowed_token_ids=(3, 4)), ((3,),), True),
        (SamplingParams(), tuple((token,) for token in range(50)), False),
    ],
)
def test_a_law_without_a_token_to_draw_is_refused(params, bad_words, is_drawable):
    admission = replace(ADMISSION, bad_words=bad_words)
    if is_drawable:
        build_spec(replace(FIELDS, params=params), admission, LIMITS, MODEL)
    else:
        with pytest.raises(RequestError):
            build_spec(replace(FIELDS, params=params), admission, LIMITS, MODEL)


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
OF_SOURCE = replace(ADMISSION, prompt_tokens=(1, 9), source_tokens=(3, 69))


@pytest.mark.parametrize(
    "option",
    [
        {"source_language": "en"},
        {"target_language": "de"},
        {"answer_prefix": "a"},
        {"answer_prefix_tokens": (3,)},
    ],
)
def test_what_encoders_have_is_refused_without_one(option):
    with pytest.raises(UnsupportedOption, match="needs a model with an encoder") as caught:
        check_fields(replace(FIELDS, options=option), LIMITS, MODEL)
    assert caught.value.field == next(iter(option))
    check_fields(replace(FIELDS, options=option), LIMITS, WITH_ENCODER)


def test_the_text_begins_with_the_decoder_prefix_and_the_requests_own():
    fields = replace(FIELDS, tokens=(3, 69))
    check_fields(fields, LIMITS, WITH_ENCODER)
    admission = replace(OF_SOURCE, answer_prefix=(5, 6), bad_words=((7, 8),))
    spec = build_spec(fields, admission, LIMITS, WITH_ENCODER)
    assert spec.source_tokens == (3, 69)
    assert spec.prompt_tokens == (1, 9, 5, 6)
    assert spec.num_prompt_tokens == 2
    assert not spec.source_is_quotable
    # The prefix may begin with what an answer must not have.
    assert spec.params.bad_words == ((7, 8), (1,))
    assert spec.max_tokens == 96
    plain = build_spec(FIELDS, ADMISSION, LIMITS, MODEL)
    assert (plain.source_tokens, plain.num_prompt_tokens, plain.params.bad_words) == ((), 3, ())


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"tokens": (70,)}, "tokens.ids", "[0, 70)"),
        ({"tokens": (3,) * 31}, "prompt", "at most 30 tokens, max_source_tokens of this server"),
        # 31 tokens at least.
        ({"tokens": None, "text": "a" * 121}, "prompt", "max_source_tokens"),
        ({"source_language": "en"}, "source_language", "left out with tokens"),
        ({"answer_prefix_tokens": (50,)}, "answer_prefix_tokens.ids", "[0, 50)"),
        ({"answer_prefix": "e" * ((1 << 20) + 1)}, "answer_prefix", "bytes"),
    ],
)
def test_sources_and_prefixes_are_refused_before_texts_are_tokenised(change, field, rule):
    with pytest.raises(RequestError) as caught:
        check_fields(replace(FIELDS, **change), LIMITS, WITH_ENCODER)
    assert caught.value.field == field
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("fields", "admission", "error", "field"),
    [
        ({}, {"source_tokens": ()}, RequestError, "prompt"),
        ({}, {"source_tokens": (3,) * 31}, ContextTooLong, "prompt"),
        ({}, {"source_tokens": (70,)}, RequestError, "prompt"),
        ({}, {"answer_prefix": (4, 1)}, RequestError, "answer_prefix"),
        (
            {"answer_prefix_tokens": (1,)},
            {"answer_prefix": (1,)},
            RequestError,
            "answer_prefix_tokens.ids",
        ),
        ({}, {"answer_prefix": (50,)}, RequestError, "answer_prefix"),
        ({}, {"answer_prefix": (3,) * 98}, ContextTooLong, "answer_prefix"),
        ({"max_tokens": 99}, {}, ContextTooLong, "max_tokens"),
        (
            {"params": SamplingParams(allowed_token_ids=(1,))},
            {},
            RequestError,
            "sampling.allowed_token_ids",
        ),
    ],
)
def test_sources_and_prefixes_are_refused_by_name_once_tokenised(fields, admission, error, field):
    with pytest.raises(error) as caught:
        given = replace(FIELDS, **fields)
        build_spec(given, replace(OF_SOURCE, **admission), LIMITS, WITH_ENCODER)
    assert caught.value.field == field


def test_the_bounds_of_sources_and_prefixes_are_allowed():
    admission = replace(OF_SOURCE, source_tokens=(3,) * 30, answer_prefix=(3,) * 97)
    assert build_spec(FIELDS, admission, LIMITS, WITH_ENCODER).max_tokens == 1
    fields = replace(FIELDS, max_tokens=98)
    assert build_spec(fields, OF_SOURCE, LIMITS, WITH_ENCODER).max_tokens == 98
    check_fields(replace(FIELDS, tokens=None, text="a" * 120), LIMITS, WITH_ENCODER)


def test_a_default_of_min_tokens_refuses_nobody():
    fields = replace(FIELDS, default_min_tokens=40)
    built = build_spec(replace(fields, max_tokens=10), ADMISSION, LIMITS, MODEL)
    assert built.params.min_tokens == 10
    assert build_spec(fields, ADMISSION, LIMITS, MODEL).params.min_tokens == 40
