"""From a checked request to what the worker gets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from outrider.engines.sampling.base import ExactnessMode, SamplingParams
from outrider.runtime.core.checks.limits import ServedModel
from outrider.runtime.core.checks.rules import (
    check_ids,
    check_prefix_size,
    check_prompt_size,
    check_range,
)
from outrider.runtime.core.errors import ContextTooLong, RequestError, UnsupportedOption
from outrider.runtime.core.params import (
    BeamParams,
    ChatMessage,
    ChatParams,
    GrammarKind,
    GrammarParams,
    RequestSpec,
    SpeculationParams,
)
from outrider.runtime.serving.chat.conversation import TOOLS_FIELD
from outrider.runtime.serving.chat.tools import (
    AUTO,
    REASONING_FIELD,
    REQUIRED,
    form_grammar,
    has_several_calls,
    reasoning_grammar,
    tools_grammar,
)
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.defaults import RequestDefaults
from outrider.v1 import inference_pb2 as wire

MODES = {
    wire.EXACTNESS_MODE_UNSPECIFIED: ExactnessMode.MAX_ACCEPT,
    wire.EXACTNESS_MODE_MAX_ACCEPT: ExactnessMode.MAX_ACCEPT,
    wire.EXACTNESS_MODE_SEED_STABLE: ExactnessMode.SEED_STABLE,
    wire.EXACTNESS_MODE_LENIENT: ExactnessMode.LENIENT,
}
# Numbers of the same name on both sides.
_SAMPLING = {
    field.name for field in fields(SamplingParams) if field.init and field.type in ("int", "float")
}
_SPECULATION = {
    "drafter": "drafter",
    "gamma": "gamma",
    "lenience": "lenience",
    "phrase_length": "phrase_length",
    "num_phrases": "num_phrases",
    "window": "window",
    "reference": "reference",
    "enabled": "is_enabled",
    "adaptive": "is_adaptive",
    "block_verification": "verifies_block",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTexts:
    """The texts of a request as token ids.

    Attributes:
        prompt: with an encoder, the source.
        decoder_prefix: the model's own; None without an encoder.
        answer_prefix: the request's own part of the decoder prefix.
        bad_words: None where the request names none.
        reference: of the speculation.
    """

    prompt: tuple[int, ...]
    decoder_prefix: tuple[int, ...] | None = None
    answer_prefix: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] | None = None
    reference: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the server adds to a request that it lets in.

    Attributes:
        internal_id: unique in the process, and the request's name where it has none.
        seed: of a request without one.
        deadline_s: on the worker's monotonic clock.
        client: who asks.
        cache_scope: name of those whom it shares cached prefixes with, but for its salt; None shares nothing.
        default_max_tokens: the protocol's own default, as far as limits and context have room; None takes the server's.
    """

    internal_id: str
    seed: int
    deadline_s: float
    client: ClientIdentity
    cache_scope: str | None = None
    default_max_tokens: int | None = None


def chat_of(chat: wire.Chat) -> ChatParams:
    """Return a conversation as it was sent."""
    has_wish = chat.HasField("add_generation_prompt")
    return ChatParams(
        messages=tuple(
            ChatMessage(role=one.role, content=one.content, fields=one.fields_json)
            for one in chat.messages
        ),
        adds_generation_prompt=chat.add_generation_prompt if has_wish else None,
        continues_final=chat.continue_final_message,
        tools=chat.tools_json,
        arguments=chat.template_arguments_json,
        template=chat.template,
    )


def sampling_of(sampling: wire.Sampling, *, has_search: bool) -> SamplingParams:
    """Return the sampling parameters but for bad words and ends; a beam search draws nothing: its temperature is 0."""
    given = {field.name: value for field, value in sampling.ListFields()}
    numbers = {name: value for name, value in given.items() if name in _SAMPLING}
    return SamplingParams(
        **({"temperature": 0.0} if has_search else {}) | numbers,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
    )


def speculation_of(speculation: wire.Speculation) -> SpeculationParams:
    """Return how a request is drafted for.

    Raises:
        RequestError: this version does not know the exactness mode.
    """
    if speculation.mode not in MODES:
        raise RequestError("speculation.mode", "must be a known mode")
    given = {field.name: value for field, value in speculation.ListFields()}
    return SpeculationParams(
        mode=MODES[speculation.mode],
        branching=tuple(speculation.branching),
        **{name: given[path] for path, name in _SPECULATION.items() if path in given},
    )


def num_results(request: wire.GenerateRequest) -> int:
    """Return the number of completions that a request asks for."""
    return request.n if request.HasField("n") else 1


def has_search(request: wire.GenerateRequest) -> bool:
    """Return whether a request, defaults filled in, is a beam search."""
    return request.HasField("num_beams") and request.num_beams != 1


def beams_of(request: wire.GenerateRequest) -> BeamParams | None:
    """Return the beam search that a request asks for, defaults filled in; None for none."""
    if not has_search(request):
        return None
    has_penalty = request.HasField("length_penalty")
    return BeamParams(
        num_beams=request.num_beams,
        num_results=num_results(request),
        length_penalty=request.length_penalty if has_penalty else 1.0,
        stops_early=request.early_stopping,
        is_exhaustive=request.exhaustive_search,
    )


def grammar_of(
    request: wire.GenerateRequest,
    rules: RequestRules,
    scope: str = "",
    prompt: tuple[int, ...] = (),
) -> GrammarParams | None:
    """Return the constraint of an answer; None for none.

    Args:
        request: with the server's defaults filled in.
        rules: of the server.
        scope: the tenant.
        prompt: its tokens, once they are known: reasoning may begin in them.

    Raises:
        RequestError: two are given, or one that belongs to another.
    """
    given = {
        GrammarKind.REGEX: request.regex,
        GrammarKind.JSON_SCHEMA: request.json_schema,
        GrammarKind.LARK: request.grammar,
    }
    kinds = [kind for kind, text in given.items() if text]
    if len(kinds) > 1:
        raise RequestError(kinds[1], f"must be left out with {kinds[0]}: an answer has one form")
    has_no_spaces = request.disable_any_whitespace
    if has_no_spaces and kinds != [GrammarKind.JSON_SCHEMA]:
        raise RequestError("disable_any_whitespace", "needs json_schema")
    # With channels an answer that goes on within the content has no place for calls.
    is_content = request.chat.continue_final_message and bool(rules.answers.content)
    if not is_content and calls_tools(request, rules) and kinds in ([], [GrammarKind.JSON_SCHEMA]):
        found = _tools_grammar(request, rules, scope, prompt)
        return found or _reasoning_grammar(request, rules, scope, prompt)
    if kinds and request.chat.tool_choice == REQUIRED:
        raise RequestError(kinds[0], "must be left out with tool_choice, which asks for calls")
    if not kinds:
        return _reasoning_grammar(request, rules, scope, prompt)
    if request.chat.HasField("max_reasoning_tokens"):
        rule = f"must be left out with {kinds[0]}, the form of an answer without reasoning"
        raise RequestError(REASONING_FIELD, rule)
    return _form_of(request, rules, kinds[0], given[kinds[0]], scope)


def _form_of(
    request: wire.GenerateRequest, rules: RequestRules, kind: GrammarKind, text: str, scope: str
) -> GrammarParams:
    """Return the constraint of an answer of a form, behind the mark of contents where there are channels."""
    chat, spaced = request.chat, not request.disable_any_whitespace
    if not (rules.answers.content and chat.parse_answer) or chat.continue_final_message:
        return GrammarParams(kind=kind, text=text, allows_whitespace=spaced, scope=scope)
    if kind == GrammarKind.LARK:
        rule = "is not supported with channels, whose marks stand around answers; use regex or json_schema"
        raise UnsupportedOption(kind, rule)
    made = form_grammar(rules.answers, kind, text, allows_whitespace=spaced)
    return GrammarParams(kind=GrammarKind.LARK, text=made, field=kind, scope=scope)


def calls_tools(request: wire.GenerateRequest, rules: RequestRules) -> bool:
    """Return whether an answer may call tools, in a format that is known."""
    chat = request.chat
    return bool(chat.tool_choice and chat.tools_json) and rules.answers.calls is not None


def _tools_grammar(
    request: wire.GenerateRequest, rules: RequestRules, scope: str, prompt: tuple[int, ...]
) -> GrammarParams | None:
    """Return the constraint of an answer that may call tools; None where it can be left free, and has to be."""
    chat = request.chat
    is_free = chat.tool_choice == AUTO and not request.json_schema
    has_grammars = GrammarKind.LARK in rules.model.constraints
    if is_free and (not has_grammars or request.ignore_eos or has_search(request)):
        return None
    text = tools_grammar(
        chat.tools_json,
        rules.answers,
        chat.tool_choice,
        chat.tool_name,
        is_single=not has_several_calls(chat),
        is_thinking=rules.answers.opens_reasoning(prompt),
        max_reasoning=(
            chat.max_reasoning_tokens if chat.HasField("max_reasoning_tokens") else None
        ),
        schema=request.json_schema,
        allows_whitespace=not request.disable_any_whitespace,
    )
    return GrammarParams(kind=GrammarKind.LARK, text=text, field=TOOLS_FIELD, scope=scope)


def _reasoning_grammar(
    request: wire.GenerateRequest, rules: RequestRules, scope: str, prompt: tuple[int, ...]
) -> GrammarParams | None:
    """Return the constraint of an answer whose reasoning alone is bounded; None for none."""
    chat = request.chat
    if not chat.HasField("max_reasoning_tokens"):
        return None
    text = reasoning_grammar(
        rules.answers,
        chat.max_reasoning_tokens,
        is_thinking=rules.answers.opens_reasoning(prompt),
    )
    return GrammarParams(kind=GrammarKind.LARK, text=text, field=REASONING_FIELD, scope=scope)


def build_spec(
    request: wire.GenerateRequest,
    texts: EncodedTexts,
    admission: Admission,
    rules: RequestRules,
    defaults: RequestDefaults,
) -> RequestSpec:
    """Return the validated request.

    ``request`` has passed ``checks.check_request``; the rest depends on its tokens.

    Raises:
        ContextTooLong: prompt and output together do not fit the context, or a source is too long.
        RequestError: the prompt is empty, the answer prefix has a banned token, min_tokens exceeds max_tokens, or no
            token could be drawn.
    """
    model = rules.model
    client, scope = admission.client, admission.cache_scope
    prompt_tokens = _text_begin(request, texts, model)
    max_tokens = _max_tokens(request, len(prompt_tokens), admission.default_max_tokens, rules)
    params = _params(request, texts, max_tokens, model, defaults)
    beams, grammar = beams_of(request), grammar_of(request, rules, client.tenant, texts.prompt)
    speculation = speculation_of(request.speculation)
    sampling = request.sampling
    return RequestSpec(
        internal_id=admission.internal_id,
        request_id=request.request_id or admission.internal_id,
        prompt_tokens=prompt_tokens,
        source_tokens=texts.prompt if model.max_source else (),
        source_is_quotable=model.shares_vocabulary,
        params=params,
        seed=sampling.seed if sampling.HasField("seed") else admission.seed,
        max_tokens=max_tokens,
        stop_strings=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        num_prompt_logprobs=(
            request.prompt_logprobs if request.HasField("prompt_logprobs") else None
        ),
        echoes_prompt=request.echo,
        skip_special_tokens=skips_special_tokens(request, rules),
        speculation=replace(speculation, reference_tokens=texts.reference),
        beams=beams,
        num_samples=num_results(request) if beams is None else 1,
        deadline_s=admission.deadline_s,
        tenant=client.tenant,
        is_known=client.is_known,
        salt=request.cache_salt,
        # No name of a scope has a slash.
        cache_scope="" if scope is None else f"{scope}/{request.cache_salt}",
        grammar=grammar if max_tokens else None,
        priority=request.priority,
        rules=client.rules,
    )


def skips_special_tokens(request: wire.GenerateRequest, rules: RequestRules) -> bool:
    """Return whether the text leaves special tokens out: by default it does, unless they mark its parts."""
    if request.HasField("skip_special_tokens"):
        return request.skip_special_tokens
    return not (request.chat.parse_answer and rules.answers.has_special)


def answer_prefix_name(request: wire.GenerateRequest) -> str:
    """Return the path of the field that the answer prefix came in."""
    is_tokens = request.WhichOneof("answer") == "answer_prefix_tokens"
    return "answer_prefix_tokens.ids" if is_tokens else "answer_prefix"


def _params(
    request: wire.GenerateRequest,
    texts: EncodedTexts,
    max_tokens: int,
    model: ServedModel,
    defaults: RequestDefaults,
) -> SamplingParams:
    """Return the sampling parameters with the tokens of words and ends, which leave a token to draw."""
    params = sampling_of(request.sampling, has_search=has_search(request))
    check_range("sampling.min_tokens", params.min_tokens, 0, max_tokens)
    if max_tokens == 0:
        # One is drawn all the same, and discarded: nothing that is asked of answers is to stand in its way.
        params = SamplingParams(temperature=0.0)
    else:
        is_left = not request.sampling.HasField("min_tokens")
        min_tokens = min(defaults.min_tokens, max_tokens) if is_left else params.min_tokens
        words = defaults.bad_words if texts.bad_words is None else texts.bad_words
        eos = () if request.ignore_eos else model.eos_token_ids
        params = replace(
            params,
            bad_words=(*words, *((token,) for token in model.banned_token_ids)),
            end_token_ids=tuple(dict.fromkeys((*eos, *request.stop_token_ids))),
            min_tokens=min_tokens,
        )
    _check_drawable(params, model.vocab_size)
    return params


def _text_begin(
    request: wire.GenerateRequest, texts: EncodedTexts, model: ServedModel
) -> tuple[int, ...]:
    """Return what the text begins with: the prompt, or with an encoder the decoder prefix."""
    if not texts.prompt:
        raise RequestError("prompt", "must have at least one token")
    check_ids("prompt", texts.prompt, model.source_vocab_size or model.vocab_size)
    check_prompt_size(len(texts.prompt), model)
    if texts.decoder_prefix is None:
        return texts.prompt
    name, given = answer_prefix_name(request), texts.answer_prefix
    check_ids(name, given, model.vocab_size)
    if not set(model.banned_token_ids).isdisjoint(given):
        raise RequestError(name, "must have none of the banned_token_ids of the model")
    check_prefix_size(name, len(given), len(texts.decoder_prefix), model)
    return (*texts.decoder_prefix, *given)


def _max_tokens(
    request: wire.GenerateRequest, num_prompt: int, default: int | None, rules: RequestRules
) -> int:
    limits, model = rules.limits, rules.model
    if not request.HasField("max_tokens"):
        most = limits.default_max_tokens if default is None else default
        return min(most, limits.max_tokens, model.max_context - num_prompt)
    num_all = num_prompt + request.max_tokens
    if num_all > model.max_context:
        what = "decoder prefix" if model.max_source else "prompt tokens"
        rule = f"{what} and max_tokens together must be at most {model.max_context}"
        raise ContextTooLong("max_tokens", rule, limit=model.max_context, given=num_all)
    return request.max_tokens


def _check_drawable(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters under which some step might have no token left to draw."""
    banned = {words[-1] for words in params.bad_words}
    if params.min_tokens > 0:
        banned.update(params.end_token_ids)
    # Nothing as long as the vocabulary is made: this runs on the event loop.
    drawable = set(params.allowed_token_ids) or range(vocab_size)
    if len(banned) >= len(drawable) and banned.issuperset(drawable):
        rule = "must leave a token that bad_words, min_tokens and the model do not ban"
        raise RequestError("sampling.allowed_token_ids", rule)
