"""Routes over the tokenizer, in vLLM's shapes: what evaluation tools ask that have no tokenizer of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.rules import check_count, check_ids, check_text
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.chat.encoder import DEFAULT_TEMPLATE
from outrider.runtime.serving.encoding import MAX_ANSWER_BYTES, RequestEncoder
from outrider.runtime.serving.http.openai import messages
from outrider.runtime.serving.http.responses import json_bytes, json_pieces
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.requests import json_types
from outrider.runtime.serving.requests.checks import check_served_chat
from outrider.runtime.serving.requests.spec import chat_of
from outrider.runtime.serving.tokenization import BYTES_PER_TOKEN
from outrider.v1 import inference_pb2 as wire

_TOKENIZE: Mapping[str, json_types.Kind] = {
    "prompt": json_types.text,
    "add_special_tokens": json_types.flag,
    "return_token_strs": json_types.flag,
}


async def tokenize(
    values: Mapping[str, Any], readiness: ServerState, encoder: RequestEncoder
) -> bytes:
    """Return the token ids of a text, or of a conversation, as JSON.

    Raises:
        RequestError: a field has another type, or a text is too long.
    """
    serving = readiness.serving
    model, limits = serving.model, serving.limits
    given = json_types.read(values, _TOKENIZE)
    if "messages" in values:
        chat = messages.chat_of(values, limits.max_messages, serving.rules.answers)
        check_served_chat(chat, serving.rules)
        data = await encoder.tokenize_chat(chat_of(chat), model.max_context)
    else:
        if "prompt" not in given:
            raise RequestError("prompt", "is required, and must be a string")
        text = given["prompt"]
        check_text("prompt", text, limits.max_prompt_bytes)
        adds_special = given.get("add_special_tokens", True)
        request = wire.TokenizeRequest(text=text, add_special_tokens=adds_special)
        data = await encoder.tokenize(request, model.max_context)
    has_texts = given.get("return_token_strs", False)
    return await encoder.beside(len(data), lambda: _told(data, model.max_context, has_texts))


def _told(data: bytes, max_context: int, has_texts: bool) -> bytes:
    """Return the answer to ``tokenize`` for that of the method Tokenize."""
    response = wire.TokenizeResponse.FromString(data)
    ids = [*response.ids]
    value = {
        "count": len(ids),
        "max_model_len": max_context,
        "tokens": ids,
        "token_strs": [*response.tokens] if has_texts else None,
    }
    return json_pieces(value)


async def detokenize(
    values: Mapping[str, Any], readiness: ServerState, encoder: RequestEncoder
) -> bytes:
    """Return the text of token ids, special ones included, as JSON.

    Raises:
        RequestError: these are no token ids, or too many.
    """
    serving = readiness.serving
    given = values.get("tokens")
    most, vocab_size = serving.limits.max_prompt_bytes, serving.model.vocab_size

    def told() -> bytes:
        tokens = json_types.ids("tokens", given)
        check_count("tokens", tokens, most)
        check_ids("tokens", tokens, vocab_size)
        text = serving.codec.decode(tokens, skip_special_tokens=False)
        if len(text) > MAX_ANSWER_BYTES:
            raise RequestError("tokens", f"must be a text of at most {MAX_ANSWER_BYTES} letters")
        return json_bytes({"prompt": text})

    num_bytes = BYTES_PER_TOKEN * len(given) if isinstance(given, list) else 0
    return await encoder.beside(num_bytes, told)


def tokenizer_info(readiness: ServerState) -> dict[str, Any]:
    """Return what the tokenizer puts around texts, and the chat template."""
    serving = readiness.serving
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
