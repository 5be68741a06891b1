"""The one validation pass: what of a request can be refused before its texts are tokenised.

Nothing that a caller controls reaches an engine unbounded: counts, bytes and every index are checked here, and what
depends on tokens in ``spec``. The rows of ``fields.FIELDS`` say what each field may be; here is what they need of each
other. Refusals name the field and the rule, never the value.
"""

from __future__ import annotations

from typing import Any

from outrider.runtime.core.checks.rules import (
    check_chat,
    check_count,
    check_ids,
    check_prefix_size,
    check_prompt_size,
    check_range,
    check_text,
)
from outrider.runtime.core.drafting import check_drafter, check_drafter_params, check_mode
from outrider.runtime.core.errors import ModelNotFound, RequestError, UnsupportedOption
from outrider.runtime.serving.chat.tools import GRAMMARS, check_choice, check_reasoning
from outrider.runtime.serving.requests.bounds import Entries, RequestRules
from outrider.runtime.serving.requests.fields import (
    FIELDS,
    MAX_SALT,
    MAX_TOKENS_RULE,
    Models,
    Search,
    given_fields,
)
from outrider.runtime.serving.requests.spec import (
    beams_of,
    chat_of,
    grammar_of,
    num_results,
    speculation_of,
)
from outrider.v1 import inference_pb2 as wire


def check_request(request: wire.GenerateRequest, search: str, rules: RequestRules) -> None:
    """Refuse what can be refused before the prompt is tokenised.

    Args:
        request: with the server's defaults filled in.
        search: what refusals call the beam search; empty where there is none.
        rules: to check against.

    Raises:
        RequestError: a field breaks its rule; names the field and the rule.
        UnsupportedOption: an option this server does not have.
        ModelNotFound: another model was named.
    """
    if request.model not in ("", rules.model.name):
        raise ModelNotFound
    given = [*given_fields(request)]
    # Lists are counted before anything looks into them: of 4 MiB that takes the event loop's time.
    for path, value in given:
        if isinstance(bound := FIELDS[path].bound, Entries):
            check_count(path, value, bound.most(rules))
    for path, value in given:
        _check_served(path, value, request, search, rules)
    for path, value in given:
        if (bound := FIELDS[path].bound) is not None:
            bound.check(path, value, rules)
    _check_prompt(request, rules)
    if len(request.cache_salt) > MAX_SALT:
        raise RequestError("cache_salt", f"must be at most {MAX_SALT} characters")
    _check_max_tokens(request, rules)
    if request.HasField("speculation"):
        _check_speculation(request.speculation, rules)
    _check_grammar(request, search, rules)
    if search:
        _check_search(request, search, rules)
    else:
        check_range("n", num_results(request), 1, min(rules.limits.max_n, rules.model.max_beams))


def _check_served(
    path: str, value: Any, request: wire.GenerateRequest, search: str, rules: RequestRules
) -> None:
    """Refuse a field that is not served, or not with this answer or model, unless it has its default."""
    field = FIELDS[path]
    if value == (num_results(request) if path == "best_of" else field.default):
        return
    if field.refusal:
        raise UnsupportedOption(path, field.refusal)
    if field.search is Search.ONLY and not search:
        raise UnsupportedOption(path, "needs num_beams above 1")
    if field.search is Search.UNREPORTED and search:
        raise UnsupportedOption(path, f"must be left out with {search}")
    has_encoder = rules.model.max_source > 0
    if field.models is Models.ENCODER_DECODER and not has_encoder:
        raise UnsupportedOption(path, "needs a model with an encoder; leave it out")
    if field.models is Models.DECODER_ONLY and has_encoder:
        raise UnsupportedOption(path, "needs a model without an encoder; leave it out")


def _check_prompt(request: wire.GenerateRequest, rules: RequestRules) -> None:
    limits, model = rules.limits, rules.model
    if request.add_special_tokens and request.WhichOneof("prompt") != "text":
        rule = "must be false or left out with tokens and chats, which get none beside their own"
        raise RequestError("add_special_tokens", rule)
    is_bare = request.HasField("add_special_tokens") and not request.add_special_tokens
    if is_bare and request.source_language:
        rule = "must be left out without add_special_tokens: a special token names it"
        raise RequestError("source_language", rule)
    match request.WhichOneof("prompt"):
        case "text":
            check_text("text", request.text, limits.max_prompt_bytes)
            if model.max_token_bytes is not None:
                # What the text needs at least; how many tokens it has is known later.
                num_bytes = len(request.text.encode())
                check_prompt_size(-(-num_bytes // model.max_token_bytes), model)
        case "chat":
            check_served_chat(request.chat, rules)
        case "tokens":
            check_prompt_size(len(request.tokens.ids), model)
            vocab_size = model.source_vocab_size or model.vocab_size
            check_ids("tokens.ids", request.tokens.ids, vocab_size)
            if request.source_language:
                rule = "must be left out with tokens, which are fed as they are"
                raise RequestError("source_language", rule)
        case _:
            raise RequestError("prompt", "one of text, tokens and chat is required")
    if request.HasField("answer_prefix_tokens"):
        name, ids = "answer_prefix_tokens.ids", request.answer_prefix_tokens.ids
        check_prefix_size(name, len(ids), 1, model)
        check_ids(name, ids, model.vocab_size)


def check_served_chat(chat: wire.Chat, rules: RequestRules) -> None:
    """Refuse a conversation that this model does not take, or that is too large: see ``check_chat``.

    Raises:
        RequestError: naming the field.
    """
    limits, model = rules.limits, rules.model
    check_count("chat.messages", chat.messages, limits.max_messages)
    check_chat(
        chat_of(chat),
        max_messages=limits.max_messages,
        max_bytes=limits.max_prompt_bytes,
        templates=model.chat_templates,
        has_encoder=model.max_source > 0,
    )
    check_choice(chat, rules.answers, GRAMMARS * limits.max_grammar_bytes)
    check_reasoning(chat, rules.answers, limits.max_tokens)


def _check_max_tokens(request: wire.GenerateRequest, rules: RequestRules) -> None:
    """Refuse an answer without tokens, unless something is asked of the prompt."""
    is_scored = request.HasField("prompt_logprobs") or request.echo
    if request.HasField("max_tokens") and request.max_tokens == 0 and not is_scored:
        rule = MAX_TOKENS_RULE.format(high=rules.limits.max_tokens)
        raise RequestError("max_tokens", rule)


def _check_speculation(speculation: wire.Speculation, rules: RequestRules) -> None:
    limits, model = rules.limits, rules.model
    params = speculation_of(speculation)
    if params.drafter is not None:
        check_drafter(params.drafter, model.drafters, model.guessers)
    check_drafter_params(params, max_reference_bytes=limits.max_reference_bytes)
    check_mode(params, can_adapt=model.can_adapt or model.max_gamma == 0)


def _check_grammar(request: wire.GenerateRequest, search: str, rules: RequestRules) -> None:
    grammar = grammar_of(request, rules)
    if grammar is None:
        return
    name = grammar.name
    if grammar.kind not in rules.model.constraints:
        raise UnsupportedOption(name, rules.model.no_constraints)
    if search:
        raise RequestError(name, f"must be left out with {search}")
    if request.ignore_eos:
        raise RequestError("ignore_eos", f"must be left out with {name}, whose end is the answer's")


def _check_search(request: wire.GenerateRequest, search: str, rules: RequestRules) -> None:
    """Refuse a search that no server of these slots could run, and what it would have to ignore."""
    beams = beams_of(request)
    assert beams is not None
    check_range("n", beams.num_results, 1, beams.num_beams, f"must be in {{}} with {search}")
    if beams.stops_early and beams.is_exhaustive:
        raise RequestError("exhaustive_search", "must be left out with early_stopping")
    if request.sampling.temperature != 0.0:
        raise RequestError("sampling.temperature", f"must be 0 or left out with {search}")
    for path, value in given_fields(request):
        if FIELDS[path].search is Search.NEVER and value != FIELDS[path].default:
            raise RequestError(path, f"must be left out with {search}")
    speculation = request.speculation
    if speculation.adaptive:
        raise RequestError("speculation.adaptive", f"must be left out with {search}")
    if speculation.mode == wire.EXACTNESS_MODE_LENIENT:
        raise RequestError("speculation.mode", f"must not be LENIENT with {search}")
    if speculation.drafter not in ("", "model", "none"):
        raise RequestError("speculation.drafter", f"must be model or none with {search}")
