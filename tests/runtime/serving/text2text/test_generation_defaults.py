"""A checkpoint's generation defaults become those of requests, as far as requests can have them."""

from __future__ import annotations

import pytest
from outrider import build_request
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import BeamParams, RequestSpec
from outrider.runtime.serving.generation_defaults import request_defaults
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.checks import check_request
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.requests.spec import Admission, EncodedTexts, build_spec

LIMITS = RequestLimits()
MODEL = ServedModel(
    name="m",
    vocab_size=50,
    max_context=100,
    max_gamma=4,
    eos_token_ids=(2,),
    drafters=("none", "lookup"),
    can_adapt=True,
    max_beams=4,
    max_source=30,
    source_vocab_size=50,
    banned_token_ids=(1,),
)
# As of bart-large-cnn.
SUMMARIES = {
    "num_beams": 4,
    "early_stopping": True,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 3,
    "min_length": 56,
    "max_length": 142,
    "forced_eos_token_id": 2,
}


def read(asked: dict[str, object], num_prefix: int = 2) -> tuple[RequestDefaults, str]:
    return request_defaults(asked, num_prefix=num_prefix, limits=LIMITS, model=MODEL)


def spec(defaults: RequestDefaults, **options: object) -> RequestSpec:
    """What the worker gets of a request that leaves all else open."""
    request, rules = build_request("a", **options), RequestRules(LIMITS, MODEL)
    check_request(request, defaults.fill(request), rules)
    admission = Admission(internal_id="i", seed=1, deadline_s=1.0, client=ClientIdentity())
    texts = EncodedTexts(prompt=(3,), decoder_prefix=(5, 6))
    return build_spec(request, texts, admission, rules, defaults)


def law(**values: object) -> SamplingParams:
    """Parameters of a model with this end token and this banned one."""
    return SamplingParams(**{"bad_words": ((1,),), "end_token_ids": (2,), **values})


def test_a_request_that_leaves_everything_open_gets_everything() -> None:
    defaults, line = read(SUMMARIES)
    found = spec(defaults)
    assert found.beams == BeamParams(num_beams=4, length_penalty=2.0, stops_early=True)
    # Of 56 and 142 two are the decoder prefix.
    assert found.params == law(temperature=0.0, no_repeat_ngram_size=3, min_tokens=54)
    assert defaults.max_tokens == 140
    assert line == (
        "defaults of requests are the checkpoint's: early_stopping True, length_penalty 2.0, num_beams 4, "
        "no_repeat_ngram_size 3, temperature 0.0, min_tokens 54, max_tokens 140; "
        "not applied: forced_eos_token_id (is not supported by this server)"
    )


def test_what_a_request_says_stands() -> None:
    defaults, _ = read(SUMMARIES)
    plain = spec(defaults, num_beams=1, temperature=0.5, no_repeat_ngram_size=0, min_tokens=0)
    assert plain.beams is None
    assert plain.params == law(temperature=0.5)
    searched = spec(defaults, num_beams=2, length_penalty=0.5, exhaustive_search=True)
    assert searched.beams == BeamParams(num_beams=2, length_penalty=0.5, is_exhaustive=True)
    assert spec(defaults, early_stopping=False).beams == BeamParams(num_beams=4, length_penalty=2.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 1.0}, "sampling.temperature"),
        ({"repetition_penalty": 1.5}, "sampling.repetition_penalty"),
        ({"stop": ["a"]}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"return_trace": True}, "return_trace"),
        ({"speculation": {"adaptive": True}}, "speculation.adaptive"),
        ({"speculation": {"mode": "EXACTNESS_MODE_LENIENT"}}, "speculation.mode"),
        ({"speculation": {"drafter": "lookup"}}, "speculation.drafter"),
    ],
)
def test_whoever_did_not_ask_for_the_search_is_told_whose_it_is(
    options: dict[str, object], field: str
) -> None:
    defaults, _ = read(SUMMARIES)
    with pytest.raises(RequestError) as caught:
        spec(defaults, **options)
    assert (caught.value.field, caught.value.rule[-54:]) == (
        field,
        "with num_beams (the server's default: say num_beams 1)",
    )
    with pytest.raises(RequestError) as caught:
        spec(defaults, num_beams=2, **options)
    assert caught.value.rule.endswith("with num_beams")


def test_without_defaults_a_request_gets_the_servers_own() -> None:
    found = spec(NO_DEFAULTS)
    assert (found.beams, found.params) == (None, law())


def test_a_checkpoint_that_samples_gives_its_parameters_and_no_search() -> None:
    drawing = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "num_beams": 2}
    defaults, line = read(drawing)
    assert spec(defaults).params == law(temperature=0.7, top_k=20, top_p=0.9)
    assert spec(defaults).beams is None
    assert line.endswith(
        "not applied: num_beams (a beam search draws nothing, and do_sample is true)"
    )
    # Transformers reads none of these where it does not sample.
    greedy, _ = read({"temperature": 0.7, "top_k": 20})
    assert spec(greedy).params == law(temperature=0.0)


def test_what_a_search_cannot_have_is_for_requests_without_one() -> None:
    defaults, line = read({"num_beams": 2, "repetition_penalty": 1.5})
    assert spec(defaults).params == law(temperature=0.0)
    assert spec(defaults, num_beams=1).params.repetition_penalty == 1.5
    assert line.endswith("not applied: repetition_penalty (only to requests without num_beams)")


@pytest.mark.parametrize(
    ("asked", "num_prefix", "least", "most"),
    [
        ({"min_length": 3, "max_length": 4}, 2, 1, 2),
        ({"min_length": 1}, 2, 0, None),
        ({"min_new_tokens": 3, "max_new_tokens": 4}, 2, 2, 3),
        ({"min_length": 9, "min_new_tokens": 3, "max_length": 9, "max_new_tokens": 4}, 1, 8, 4),
    ],
)
def test_lengths_are_those_of_the_output_alone(
    asked: dict[str, object], num_prefix: int, least: int, most: int | None
) -> None:
    defaults, _ = read(asked, num_prefix)
    assert (defaults.min_tokens, defaults.max_tokens) == (least, most)


def test_lengths_are_bounded_by_the_servers() -> None:
    defaults, _ = read({"min_length": 10**30, "max_length": 10**30})
    assert (defaults.min_tokens, defaults.max_tokens) == (LIMITS.max_tokens, LIMITS.max_tokens)


def test_bad_words_but_those_that_are_banned_anyway() -> None:
    defaults, _ = read({"bad_words_ids": [[1], [3, 4], [5]]})
    assert defaults.bad_words == ((3, 4), (5,))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_beams": 5}, "num_beams (must be in [1, 4])"),
        ({"num_beams": "4"}, "num_beams (must be a whole number)"),
        ({"length_penalty": 11.0}, "length_penalty (must be in [-10.0, 10.0])"),
        ({"length_penalty": 10**400}, "length_penalty (must be a number of 64 bits)"),
        ({"repetition_penalty": 3.0}, "repetition_penalty (must be in [0.01, 2.0])"),
        ({"no_repeat_ngram_size": 11}, "no_repeat_ngram_size (must be in [0, 10])"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size (must be a whole number)"),
        ({"early_stopping": 3}, "early_stopping (must be true, false or"),
        ({"max_length": 2}, "max_length (must leave a token behind the decoder prefix)"),
        ({"min_length": True}, "min_length (must be a whole number)"),
        ({"bad_words_ids": [[50]]}, "bad_words_ids (token ids must be in [0, 50))"),
        ({"bad_words_ids": [3]}, "bad_words_ids (must be a list of lists of token ids)"),
        ({"diversity_penalty": 0.5}, "diversity_penalty (is not supported by this server)"),
        ({"renormalize_logits": True}, "renormalize_logits (is not supported by this server)"),
    ],
)
def test_what_no_request_could_ask_for_is_left_out_and_said(
    asked: dict[str, object], reason: str
) -> None:
    defaults, line = read(asked)
    assert defaults == RequestDefaults(sampling={"temperature": 0.0})
    assert reason in line


def test_where_nothing_was_taken_the_line_says_so() -> None:
    _, line = read({"do_sample": True, "diversity\npenalty": 0.5})
    assert line == (
        "the checkpoint has no defaults for requests; "
        "not applied: 'diversity\\npenalty' (is not supported by this server)"
    )


def test_values_that_ask_for_nothing_are_not_mentioned() -> None:
    asked = {
        "num_beam_groups": 1,
        "typical_p": 1.0,
        "diversity_penalty": 0.0,
        "guidance_scale": None,
    }
    _, line = read({**asked, "num_return_sequences": 1, "renormalize_logits": False})
    assert line == "defaults of requests are the checkpoint's: temperature 0.0"
