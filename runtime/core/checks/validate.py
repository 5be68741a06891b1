"""What a request may ask for: from wire values to a ``RequestSpec``.

Nothing that a caller controls reaches an engine unbounded: counts, bytes and every index are
checked here, before text is tokenised where that is possible. Pure; knows neither the wire's types
nor a tokenizer. Messages name field, rule and limit, never the value.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.checks.fields import Admission, GenerateFields
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.options import (
    REQUEST_ID,
    check_beams,
    check_chat,
    check_count,
    check_ids,
    check_options,
    check_range,
    check_ranked,
    check_text,
    check_texts,
)
from outrider.runtime.core.drafting import check_drafter, check_drafter_params, check_mode
from outrider.runtime.core.errors import (
    ContextTooLong,
    ModelNotFound,
    RequestError,
    UnsupportedOption,
)
from outrider.runtime.core.params import ChatParams, GrammarParams, RequestSpec, SpeculationParams
from outrider.runtime.core.tenant import PRIORITIES

# Below this, logits divided by the number leave float32; vLLM clamps temperature at the same place.
SMALLEST_DIVISOR = 0.01
MAX_SEED = 2**64 - 1
# Models ask for 2 to 4; a bound, since every position compares that many tokens.
MAX_NGRAM_SIZE = 10
MAX_SALT = 128


def check_fields(fields: GenerateFields, limits: RequestLimits, model: ServedModel) -> None:
    """Refuse what can be refused before the prompt is tokenised.

    Raises:
        RequestError: a field breaks its rule; names the field and the rule.
        UnsupportedOption: an option this server does not have.
        ModelNotFound: another model was named.
    """
    if fields.model not in ("", model.name):
        raise ModelNotFound
    check_options(fields.options, search=fields.search_name, has_encoder=model.max_source > 0)
    if fields.request_id and not REQUEST_ID.fullmatch(fields.request_id):
        raise RequestError("request_id", "must be 1..128 characters of [A-Za-z0-9._:-]")
    _check_prompt(fields, limits, model)
    if len(fields.cache_salt) > MAX_SALT:
        raise RequestError("cache_salt", f"must be at most {MAX_SALT} characters")
    check_range("priority", fields.priority, *PRIORITIES)
    _check_stops(fields, limits, model)
    _check_law(fields.params, limits, model)
    check_texts("sampling.bad_words", fields.bad_words, limits.max_bad_words, limits.max_stop_bytes)
    check_range("sampling.seed", fields.seed or 0, 0, MAX_SEED)
    if fields.num_logprobs is not None:
        most = min(limits.max_logprobs, model.vocab_size)
        check_range("logprobs", fields.num_logprobs, 0, most)
    _check_scoring(fields, limits, model)
    _check_speculation(fields.speculation, limits, model)
    if fields.grammar is not None:
        _check_grammar(fields, fields.grammar, limits, model)
    if fields.beams is not None:
        most = min(limits.max_beams, model.max_beams)
        check_beams(fields.beams, most, fields.search_name)
        given = {
            "stop": bool(fields.stop_strings),
            "logprobs": fields.num_logprobs is not None,
            "prompt_logprobs": fields.num_prompt_logprobs is not None,
            "echo": fields.echoes_prompt,
        }
        check_ranked(fields.params, fields.speculation, given, fields.search_name)
    else:
        check_range("n", fields.num_samples, 1, min(limits.max_n, model.max_beams))


def build_spec(
    fields: GenerateFields, admission: Admission, limits: RequestLimits, model: ServedModel
) -> RequestSpec:
    """The validated request.

    ``fields`` have passed ``check_fields``; the rest depends on the tokenised prompt and bad words.

    Raises:
        ContextTooLong: prompt and output together do not fit the context, or a source is too long.
        RequestError: the prompt is empty, the answer prefix has a banned token, min_tokens exceeds max_tokens, or no
            token could be drawn.
    """
    prompt_tokens, scope = _check_tokens(fields, admission, model), admission.cache_scope
    max_tokens = _resolve_max_tokens(fields, len(prompt_tokens), limits, model)
    check_range("sampling.min_tokens", fields.params.min_tokens, 0, max_tokens)
    eos = () if fields.ignore_eos else model.eos_token_ids
    params = replace(
        fields.params,
        bad_words=(*admission.bad_words, *((token,) for token in model.banned_token_ids)),
        end_token_ids=tuple(dict.fromkeys((*eos, *fields.stop_token_ids))),
        min_tokens=max(fields.params.min_tokens, min(fields.default_min_tokens, max_tokens)),
    )
    if max_tokens == 0:
        # One is drawn all the same, and discarded: nothing that is asked of answers is to stand in its way.
        params = SamplingParams(temperature=0.0)
    _check_drawable(params, model.vocab_size)
    return RequestSpec(
        internal_id=admission.internal_id,
        request_id=admission.request_id,
        prompt_tokens=prompt_tokens,
        source_tokens=admission.source_tokens,
        source_is_quotable=model.shares_vocabulary,
        params=params,
        seed=admission.seed,
        max_tokens=max_tokens,
        stop_strings=fields.stop_strings,
        include_stop=fields.include_stop,
        num_logprobs=fields.num_logprobs,
        num_prompt_logprobs=fields.num_prompt_logprobs,
        echoes_prompt=fields.echoes_prompt,
        skip_special_tokens=fields.skip_special_tokens,
        speculation=fields.speculation,
        beams=fields.beams,
        num_samples=fields.num_samples,
        deadline_s=admission.deadline_s,
        tenant=admission.tenant,
        is_known=admission.is_known,
        # No name of a scope has a slash.
        cache_scope="" if scope is None else f"{scope}/{fields.cache_salt}",
        grammar=fields.grammar if max_tokens else None,
        priority=fields.priority,
        rules=admission.rules,
    )


def _check_prompt(fields: GenerateFields, limits: RequestLimits, model: ServedModel) -> None:
    if fields.text is not None:
        check_text("text", fields.text, limits.max_prompt_bytes)
        if model.max_token_bytes is not None:
            # What the text needs at least; how many tokens it has is known later.
            num_bytes = len(fields.text.encode())
            check_prompt_size(-(-num_bytes // model.max_token_bytes), model)
    elif fields.chat is not None:
        check_model_chat(fields.chat, limits, model)
    elif fields.tokens is None:
        raise RequestError("prompt", "one of text, tokens and chat is required")
    else:
        check_prompt_size(len(fields.tokens), model)
        check_ids("tokens.ids", fields.tokens, model.source_vocab_size or model.vocab_size)
        if fields.source_language:
            rule = "must be left out with tokens, which are fed as they are"
            raise RequestError("source_language", rule)
    check_text("answer_prefix", fields.answer_prefix, limits.max_prompt_bytes)
    check_ids(fields.answer_prefix_name, fields.answer_prefix_tokens or (), model.vocab_size)


def check_model_chat(chat: ChatParams, limits: RequestLimits, model: ServedModel) -> None:
    """Refuse a conversation that this model does not take, or that is too large: see ``check_chat``."""
    check_chat(
        chat,
        max_messages=limits.max_messages,
        max_bytes=limits.max_prompt_bytes,
        templates=model.chat_templates,
        has_encoder=model.max_source > 0,
    )


def _check_stops(fields: GenerateFields, limits: RequestLimits, model: ServedModel) -> None:
    check_texts("stop", fields.stop_strings, limits.max_stop_strings, limits.max_stop_bytes)
    check_count("stop_token_ids", fields.stop_token_ids, limits.max_stop_token_ids)
    check_ids("stop_token_ids", fields.stop_token_ids, model.vocab_size)


def _check_scoring(fields: GenerateFields, limits: RequestLimits, model: ServedModel) -> None:
    """Refuse what asks of a prompt, where it is a source, and an answer of no token where nothing else is asked."""
    asked = {
        "prompt_logprobs": fields.num_prompt_logprobs is not None,
        "echo": fields.echoes_prompt,
    }
    for name, is_asked in asked.items():
        if is_asked and model.max_source:
            raise UnsupportedOption(name, "needs a model without an encoder; leave it out")
    if fields.num_prompt_logprobs is not None:
        most = min(limits.max_prompt_logprobs, model.vocab_size)
        check_range("prompt_logprobs", fields.num_prompt_logprobs, 0, most)
    if fields.max_tokens is not None and (fields.max_tokens or not any(asked.values())):
        rule = "must be in {}, or 0 with prompt_logprobs or echo"
        check_range("max_tokens", fields.max_tokens, 1, limits.max_tokens, rule)


def _check_law(params: SamplingParams, limits: RequestLimits, model: ServedModel) -> None:
    if params.temperature != 0.0:
        rule = f"must be 0 or in [{SMALLEST_DIVISOR}, 2]"
        check_range("sampling.temperature", params.temperature, SMALLEST_DIVISOR, 2.0, rule)
    check_range("sampling.top_k", params.top_k, 0, model.vocab_size - 1)
    if not 0.0 < params.top_p <= 1.0:
        raise RequestError("sampling.top_p", "must be in (0, 1]")
    check_range("sampling.min_p", params.min_p, 0.0, 1.0)
    check_range("sampling.repetition_penalty", params.repetition_penalty, SMALLEST_DIVISOR, 2.0)
    check_range("sampling.presence_penalty", params.presence_penalty, -2.0, 2.0)
    check_range("sampling.frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_count("sampling.logit_bias", params.logit_bias, limits.max_logit_bias)
    check_ids("sampling.logit_bias", [token for token, _ in params.logit_bias], model.vocab_size)
    for _, bias in params.logit_bias:
        check_range("sampling.logit_bias", bias, -100.0, 100.0)
    name = "sampling.allowed_token_ids"
    check_count(name, params.allowed_token_ids, limits.max_allowed_token_ids)
    check_ids(name, params.allowed_token_ids, model.vocab_size)
    check_range("sampling.min_tokens", params.min_tokens, 0, limits.max_tokens)
    check_range("sampling.no_repeat_ngram_size", params.no_repeat_ngram_size, 0, MAX_NGRAM_SIZE)


def _check_speculation(
    params: SpeculationParams, limits: RequestLimits, model: ServedModel
) -> None:
    if params.drafter is not None:
        check_drafter(params.drafter, model.drafters, model.guessers)
    check_drafter_params(params, max_reference_bytes=limits.max_reference_bytes)
    if params.gamma is not None:
        check_range("speculation.gamma", params.gamma, 0, model.max_gamma)
    check_mode(params, can_adapt=model.can_adapt or model.max_gamma == 0)


def _check_grammar(
    fields: GenerateFields, grammar: GrammarParams, limits: RequestLimits, model: ServedModel
) -> None:
    name = grammar.kind
    if name not in model.constraints:
        raise UnsupportedOption(name, model.no_constraints)
    check_text(name, grammar.text, limits.max_grammar_bytes)
    if fields.beams is not None:
        raise RequestError(name, f"must be left out with {fields.search_name}")
    if fields.ignore_eos:
        raise RequestError("ignore_eos", f"must be left out with {name}, whose end is the answer's")


def _check_tokens(
    fields: GenerateFields, admission: Admission, model: ServedModel
) -> tuple[int, ...]:
    """Return what the text begins with: the prompt, or with an encoder the decoder prefix."""
    has_encoder = model.max_source > 0
    prompt = admission.source_tokens if has_encoder else admission.prompt_tokens
    if not prompt:
        raise RequestError("prompt", "must have at least one token")
    check_ids("prompt", prompt, model.source_vocab_size or model.vocab_size)
    check_prompt_size(len(prompt), model)
    if not has_encoder:
        return prompt
    check_ids(fields.answer_prefix_name, admission.answer_prefix, model.vocab_size)
    if not set(model.banned_token_ids).isdisjoint(admission.answer_prefix):
        rule = "must have none of the banned_token_ids of the model"
        raise RequestError(fields.answer_prefix_name, rule)
    num_given, num_own = len(admission.answer_prefix), len(admission.prompt_tokens)
    check_prefix_size(fields.answer_prefix_name, num_given, num_own, model)
    return (*admission.prompt_tokens, *admission.answer_prefix)


def _resolve_max_tokens(
    fields: GenerateFields, num_prompt: int, limits: RequestLimits, model: ServedModel
) -> int:
    asked, max_context = fields.max_tokens, model.max_context
    if asked is None:
        default = fields.default_max_tokens
        default = limits.default_max_tokens if default is None else default
        return min(default, limits.max_tokens, max_context - num_prompt)
    if num_prompt + asked > max_context:
        what = "decoder prefix" if model.max_source else "prompt tokens"
        rule = f"{what} and max_tokens together must be at most {max_context}"
        raise ContextTooLong("max_tokens", rule, limit=max_context, given=num_prompt + asked)
    return asked


def check_prefix_size(name: str, num_given: int, num_own: int, model: ServedModel) -> None:
    """Refuse an answer prefix that leaves no room for a token behind ``num_own`` tokens of the model's."""
    limit = model.max_context - 1 - num_own
    if num_given > limit:
        rule = f"must be at most {limit} tokens behind the decoder prefix"
        raise ContextTooLong(name, rule, limit=limit, given=num_given)


def check_prompt_size(num_prompt: int, model: ServedModel) -> None:
    """Refuse a prompt that leaves no room for a token, or a source that is too long to be read."""
    limit, name = model.max_context - 1, ""
    if model.max_source:
        limit, name = model.max_source, ", max_source_tokens of this server"
    if num_prompt > limit:
        rule = f"must be at most {limit} tokens{name}"
        raise ContextTooLong("prompt", rule, limit=limit, given=num_prompt)


def _check_drawable(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a law under which some step might have no token left to draw."""
    banned = {words[-1] for words in params.bad_words}
    if params.min_tokens > 0:
        banned.update(params.end_token_ids)
    # Nothing as long as the vocabulary is made: this runs on the event loop.
    drawable = set(params.allowed_token_ids) or range(vocab_size)
    if len(banned) >= len(drawable) and banned.issuperset(drawable):
        rule = "must leave a token that bad_words, min_tokens and the model do not ban"
        raise RequestError("sampling.allowed_token_ids", rule)
