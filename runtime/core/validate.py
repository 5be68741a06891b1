"""What a request may ask for: the table of limits, and from wire values to a ``RequestSpec``.

Nothing that a caller controls reaches an engine unbounded: counts, bytes and every index are
checked here, before text is tokenised where that is possible. Pure; knows neither the wire's types
nor a tokenizer. Messages name field, rule and limit, never the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.config import MOST_COUNT
from outrider.runtime.core.drafting import check_drafter, check_drafter_params, check_mode
from outrider.runtime.core.errors import (
    ConfigError,
    ContextTooLong,
    ModelNotFound,
    RequestError,
    UnsupportedOption,
)
from outrider.runtime.core.options import (
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
from outrider.runtime.core.params import (
    BeamParams,
    ChatParams,
    GrammarParams,
    RequestSpec,
    SpeculationParams,
)
from outrider.runtime.core.tenant import NO_RULES, PRIORITIES, TenantRules

# Below this, logits divided by the number leave float32; vLLM clamps temperature at the same place.
SMALLEST_DIVISOR = 0.01
MAX_SEED = 2**64 - 1
# Models ask for 2 to 4; a bound, since every position compares that many tokens.
MAX_NGRAM_SIZE = 10
MAX_SALT = 128
# With less no request could be served.
_AT_LEAST_ONE = (
    "max_prompt_bytes", "max_tokens", "default_max_tokens", "max_beams", "max_n", "max_message_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of one request; ``GetServerInfo`` reports them.

    Attributes:
        max_prompt_bytes: UTF-8 bytes of a text prompt, checked before it is tokenised; of a chat those of all its
            texts together, and those of the rendered one.
        max_tokens: output tokens at most; the context bounds them too.
        default_max_tokens: output tokens where a request does not say.
        max_stop_strings: strings that end an answer.
        max_stop_bytes: UTF-8 bytes of one of them.
        max_stop_token_ids: tokens that end an answer.
        max_logit_bias: tokens with a bias of their own.
        max_allowed_token_ids: tokens that an answer may be restricted to.
        max_bad_words: words that an answer must not hold.
        max_logprobs: alternatives whose log probability an output token is given with.
        max_prompt_logprobs: likewise of a prompt's token.
        max_beams: of a beam search; the engine's slots bound them too.
        max_n: completions of one request; the engine's slots bound them too.
        max_abort_ids: requests that one call may abort.
        max_request_s: seconds a request may take in all, whatever the client's deadline.
        max_message_bytes: bytes of a request message.
        max_reference_bytes: UTF-8 bytes of a reference text.
        max_grammar_bytes: UTF-8 bytes of a regular expression, schema or grammar.
        max_messages: of a chat.
    """

    max_prompt_bytes: int = 1 << 20
    max_tokens: int = 4096
    default_max_tokens: int = 256
    max_stop_strings: int = 8
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_allowed_token_ids: int = 10_000
    max_bad_words: int = 64
    max_logprobs: int = 20
    max_prompt_logprobs: int = 5
    max_beams: int = 16
    max_n: int = 16
    max_abort_ids: int = 256
    max_request_s: float = 600.0
    max_message_bytes: int = 4 << 20
    max_reference_bytes: int = 1 << 16
    max_grammar_bytes: int = 8192
    max_messages: int = 1024

    def __post_init__(self) -> None:
        """Raise ConfigError for a limit out of range, with its key and its rule."""
        for key in (one.name for one in fields(self) if one.name != "max_request_s"):
            least = int(key in _AT_LEAST_ONE)
            if not least <= getattr(self, key) <= MOST_COUNT:
                raise ConfigError(key, f"must be in [{least}, {MOST_COUNT}]")
        if not self.max_request_s > 0.0:
            raise ConfigError("max_request_s", "must be more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against.

    Attributes:
        max_context: tokens of prompt and output together; with an encoder, of decoder prefix and output.
        max_gamma: draft tokens per step at most.
        drafters: names a request may ask for.
        guessers: those of them that may speculate on the draft model, as "model/NAME".
        can_adapt: whether gamma can be chosen step by step.
        max_beams: slots that one request may hold.
        max_token_bytes: bytes of a prompt that one token stands for at most; None where that is not known.
        max_source: tokens of a source at most; 0 for a model without an encoder.
        source_vocab_size: of the sources' tokens; 0 for a model without an encoder.
        shares_vocabulary: whether ids of sources and answers stand for the same tokens.
        banned_token_ids: never drawn, and never part of a request's own answer prefix.
        constraints: names of the fields that ask for a form of the answer and are served.
        no_constraints: the rule that a request breaks which asks for another one.
        chat_templates: names of the templates for chats; empty where there are none.
    """

    name: str
    vocab_size: int
    max_context: int
    max_gamma: int
    eos_token_ids: tuple[int, ...]
    drafters: tuple[str, ...]
    guessers: tuple[str, ...] = ()
    can_adapt: bool = False
    max_beams: int = 1
    max_token_bytes: int | None = None
    max_source: int = 0
    source_vocab_size: int = 0
    shares_vocabulary: bool = True
    banned_token_ids: tuple[int, ...] = ()
    constraints: tuple[str, ...] = ()
    no_constraints: str = "is not supported by this server; leave it out"
    chat_templates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFields:
    """A request as it arrived, defaults filled in; nothing is checked yet.

    Attributes:
        text: prompt as text, or None when it came as ``tokens`` or ``chat``.
        max_tokens: None takes the default.
        default_max_tokens: the dialect's default, where the limits and the context leave room for it; None takes the
            server's.
        beams: None for one completion, which is drawn or greedy.
        options: values of the options in ``runtime.core.options``, by name.
        source_language: code; empty for the model's default.
        target_language: likewise.
        answer_prefix: what the answer begins with, as text, unless it came as ``answer_prefix_tokens``.
        default_min_tokens: as ``params.min_tokens``, of a server's default: less where max_tokens is.
        has_default_beams: whether the beam search is a server's default, and the request did not ask for it.
        grammar: as in ``RequestSpec``, and likewise below.
        cache_salt: makes a scope of cached prefixes of its own within the tenant.
        priority: as in ``RequestSpec``.
        num_samples: completions of the prompt, drawn apart; 1 with a beam search.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: ChatParams | None = None
    request_id: str = ""
    model: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    num_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    beams: BeamParams | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    source_language: str = ""
    target_language: str = ""
    answer_prefix: str = ""
    answer_prefix_tokens: tuple[int, ...] | None = None
    default_min_tokens: int = 0
    has_default_beams: bool = False
    grammar: GrammarParams | None = None
    num_prompt_logprobs: int | None = None
    echoes_prompt: bool = False
    cache_salt: str = ""
    priority: int = 0
    num_samples: int = 1

    @property
    def search_name(self) -> str:
        """What refusals call the beam search; empty where there is none."""
        if self.beams is None:
            return ""
        default = " (the server's default: say num_beams 1)" if self.has_default_beams else ""
        return f"num_beams{default}"

    @property
    def answer_prefix_name(self) -> str:
        """Path of the field that the answer prefix came in."""
        return "answer_prefix" if self.answer_prefix_tokens is None else "answer_prefix_tokens.ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the service adds to a request when it lets it in.

    Attributes:
        prompt_tokens: the prompt, tokenised; with an encoder, the model's own decoder prefix.
        bad_words: token sequences of the bad words.
        deadline_s: on the worker's monotonic clock.
        tenant: as ``runtime.core.tenant`` reads it.
        is_known: likewise.
        source_tokens: the prompt, tokenised, where the model has an encoder.
        answer_prefix: the request's own part of the decoder prefix, tokenised.
        cache_scope: name of those whom it shares cached prefixes with, but for its salt; None shares nothing.
        rules: the tenant's share.
    """

    internal_id: str
    request_id: str
    prompt_tokens: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seed: int
    deadline_s: float | None
    tenant: str = ""
    is_known: bool = True
    source_tokens: tuple[int, ...] = ()
    answer_prefix: tuple[int, ...] = ()
    cache_scope: str | None = None
    rules: TenantRules = NO_RULES


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
