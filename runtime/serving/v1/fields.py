"""Turns the fields of a request, by their names in ``outrider.v1``, into those of a generation request.

Every protocol that speaks of these fields fills in what is left open here, so that all have the same defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.options import ALL_VALUES
from outrider.runtime.core.params import BeamParams, SpeculationParams
from outrider.runtime.grammar.base import grammar_params
from outrider.runtime.serving.generation_defaults import RequestDefaults

# Fields of the same name and value on both sides.
_SAMPLING = (
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "no_repeat_ngram_size",
)  # fmt: skip
_SPECULATION = (
    "drafter", "gamma", "mode", "lenience", "phrase_length", "num_phrases", "window", "reference",
)  # fmt: skip
# What the answer's text has the form of, and what it is where it is left out.
_FORM = {"regex": "", "json_schema": "", "grammar": "", "disable_any_whitespace": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a request says; a name that is missing was left out.

    Attributes:
        fields: of ``GenerateRequest``: a prompt is ``text``, ``tokens`` (a tuple) or ``chat`` (``ChatParams``), and
            ``answer_prefix_tokens`` a tuple.
        sampling: of ``Sampling``.
        speculation: of ``Speculation``; ``mode`` is an ``ExactnessMode``.
    """

    fields: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)


def generate_fields(
    request: Given, defaults: RequestDefaults, default_max_tokens: int | None = None
) -> GenerateFields:
    """Return a request's values with defaults filled in, unchecked.

    ``default_max_tokens`` are the dialect's own; None takes the server's.

    Raises:
        RequestError: two forms are asked for.
    """
    given = defaults.search_of(request.fields)
    speculation = request.speculation
    beams = _beams(given, speculation)
    sampling = defaults.sampling_of(request.sampling, has_beams=beams is not None)
    return GenerateFields(
        text=given.get("text"),
        tokens=given.get("tokens"),
        chat=given.get("chat"),
        request_id=given.get("request_id", ""),
        model=given.get("model", ""),
        # A beam search draws nothing, so a missing temperature is 0.
        params=_sampling(sampling, 1.0 if beams is None else 0.0),
        bad_words=tuple(sampling.get("bad_words", ())),
        seed=sampling.get("seed"),
        max_tokens=given.get("max_tokens"),
        default_max_tokens=default_max_tokens,
        stop_strings=tuple(given.get("stop", ())),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
        include_stop=given.get("include_stop_str_in_output", False),
        ignore_eos=given.get("ignore_eos", False),
        num_logprobs=given.get("logprobs"),
        num_prompt_logprobs=given.get("prompt_logprobs"),
        echoes_prompt=given.get("echo", False),
        skip_special_tokens=given.get("skip_special_tokens", True),
        speculation=_speculation(speculation),
        beams=beams,
        options=_options(given, speculation),
        num_samples=given.get("n", 1) if beams is None else 1,
        source_language=given.get("source_language", ""),
        target_language=given.get("target_language", ""),
        answer_prefix=given.get("answer_prefix", ""),
        answer_prefix_tokens=given.get("answer_prefix_tokens"),
        default_min_tokens=0 if "min_tokens" in sampling else defaults.min_tokens,
        has_default_beams="num_beams" not in request.fields,
        cache_salt=given.get("cache_salt", ""),
        priority=given.get("priority", 0),
        grammar=grammar_params(**{name: given.get(name, zero) for name, zero in _FORM.items()}),
    )


def _beams(given: Mapping[str, Any], speculation: Mapping[str, Any]) -> BeamParams | None:
    num_beams = given.get("num_beams", 1)
    if num_beams == 1:
        return None
    return BeamParams(
        num_beams=num_beams,
        num_results=given.get("n", 1),
        length_penalty=given.get("length_penalty", 1.0),
        stops_early=given.get("early_stopping", False),
        is_exhaustive=given.get("exhaustive_search", False),
        width=speculation.get("beam_width", 0),
    )


def _sampling(sampling: Mapping[str, Any], default_temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.get("temperature", default_temperature),
        **{name: sampling[name] for name in _SAMPLING if name in sampling},
        logit_bias=tuple(sorted(sampling.get("logit_bias", {}).items())),
        allowed_token_ids=tuple(sampling.get("allowed_token_ids", ())),
    )


def _speculation(given: Mapping[str, Any]) -> SpeculationParams:
    return SpeculationParams(
        is_enabled=given.get("enabled", True),
        is_adaptive=given.get("adaptive"),
        verifies_block=given.get("block_verification"),
        branching=tuple(given.get("branching", ())),
        **{name: given[name] for name in _SPECULATION if name in given},
    )


def _options(given: Mapping[str, Any], speculation: Mapping[str, Any]) -> dict[str, object]:
    """Return those of ``ALL_VALUES`` that were given, by name."""
    named = {**given, **{f"speculation.{name}": value for name, value in speculation.items()}}
    if named.get("best_of") == named.get("n", 1):
        del named["best_of"]  # its default
    return {path: named[path] for path in ALL_VALUES if path in named}
