"""Routes over the tokenizer, in vLLM's shapes: what evaluation tools ask that have no tokenizer of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.options import check_count, check_ids, check_text
from outrider.runtime.core.checks.validate import check_model_chat
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat.encoder import DEFAULT_TEMPLATE
from outrider.runtime.serving.encoding import MAX_ANSWER_BYTES
from outrider.runtime.serving.http.openai import kinds
from outrider.runtime.serving.http.openai.messages import chat_of
from outrider.runtime.serving.intake import Intake
from outrider.runtime.serving.ledger import Caller
from outrider.v1 import inference_pb2 as wire

_TOKENIZE: Mapping[str, kinds.Kind] = {
    "prompt": kinds.text,
    "add_special_tokens": kinds.flag,
    "return_token_strs": kinds.flag,
}


async def tokenize(values: Mapping[str, Any], intake: Intake, caller: Caller) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation.

    Raises:
        RequestError: a field has another type, or a text is too long.
        QuotaExceeded: the caller's tenant has used up its share.
    """
    serving, frontend = intake.serving, intake.frontend
    model, limits = serving.model, serving.limits
    given = kinds.read(values, _TOKENIZE)
    if "messages" in values:
        chat = chat_of(values, limits.max_messages)
        check_model_chat(chat, limits, model)
        encoder = frontend.encoder_for(caller.method, caller)
        data = await encoder.tokenize_chat(chat, model.max_context)
    else:
        if "prompt" not in given:
            raise RequestError("prompt", "is required, and must be a string")
        text = given["prompt"]
        check_text("prompt", text, limits.max_prompt_bytes)
        adds_special = given.get("add_special_tokens", True)
        request = wire.TokenizeRequest(text=text, add_special_tokens=adds_special)
        encoder = frontend.encoder_for(caller.method, caller)
        data = await encoder.tokenize(request, model.max_context)
    response = wire.TokenizeResponse.FromString(data)
    ids = [*response.ids]
    has_texts = given.get("return_token_strs", False)
    return {
        "count": len(ids),
        "max_model_len": model.max_context,
        "tokens": ids,
        "token_strs": [*response.tokens] if has_texts else None,
    }


async def detokenize(values: Mapping[str, Any], intake: Intake, caller: Caller) -> dict[str, Any]:
    """Return the text of token ids, special ones included.

    Raises:
        RequestError: these are no token ids, or too many.
        QuotaExceeded: the caller's tenant has used up its share.
    """
    serving = intake.serving
    tokens = kinds.ids("tokens", values.get("tokens"))
    check_count("tokens", tokens, serving.limits.max_prompt_bytes)
    check_ids("tokens", tokens, serving.model.vocab_size)
    fields = GenerateFields(tokens=tokens, skip_special_tokens=False)
    encoder = intake.frontend.encoder_for(caller.method, caller)
    text = await encoder.echo(fields, tokens)
    if len(text) > MAX_ANSWER_BYTES:
        raise RequestError("tokens", f"must be a text of at most {MAX_ANSWER_BYTES} letters")
    return {"prompt": text}


def tokenizer_info(intake: Intake) -> dict[str, Any]:
    """Return what the tokenizer puts around texts, and the chat template."""
    serving = intake.serving
    codec, model, chats = serving.codec, serving.model, serving.chats
    beginning = codec.encode("", True)
    ends = model.eos_token_ids
    return {
        "tokenizer_class": type(codec).__name__,
        "vocab_size": model.vocab_size,
        "model_max_length": model.max_context,
        "bos_token": codec.spell(beginning[0]) if beginning else None,
        "eos_token": codec.spell(ends[0]) if ends else None,
        "pad_token": None,
        "chat_template": None if chats is None else chats.files.templates.get(DEFAULT_TEMPLATE),
    }
