"""The prompts of a completion: one or several, of text or of token ids."""

from __future__ import annotations

from typing import Any

from outrider.runtime.core.checks.rules import check_count, check_ids, check_prompt_size
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.json_types import is_ids
from outrider.v1 import inference_pb2 as wire

MAX_PROMPTS = 256
"""Prompts of one request; each is a generation request."""
MOST_COPIED = 32 << 20
"""Bytes of a request's options in all its prompts' requests together; the longest that limits allow have 18 MiB."""
_RULE = "must be a string, an array of strings, an array of token ids or an array of those"


def prompts_of(
    value: Any, request: wire.GenerateRequest, rules: RequestRules
) -> list[wire.GenerateRequest]:
    """Return a request for each prompt, which asks for the same as ``request``.

    Raises:
        RequestError: it is no prompt, or there are too many.
        ContextTooLong: one of token ids is too long.
    """
    if value is None:
        raise RequestError("prompt", f"is required, and {_RULE}")
    if isinstance(value, str):
        return [_with_prompt(request, value, rules)]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt", _RULE)
    if type(value[0]) is int:
        check_prompt_size(len(value), rules.model)
        value = [value]
    check_count("prompt", value, MAX_PROMPTS)
    if request.ByteSize() * len(value) > MOST_COPIED:
        raise RequestError("prompt", "must be fewer prompts beside so long options")
    return [_with_prompt(request, one, rules) for one in value]


def _with_prompt(
    request: wire.GenerateRequest, value: Any, rules: RequestRules
) -> wire.GenerateRequest:
    asked = wire.GenerateRequest()
    asked.CopyFrom(request)
    if isinstance(value, str):
        asked.text = value
        return asked
    if isinstance(value, list):
        check_prompt_size(len(value), rules.model)
    if not is_ids(value):
        raise RequestError("prompt", _RULE)
    check_ids("prompt", value, rules.model.source_vocab_size or rules.model.vocab_size)
    asked.tokens.ids.extend(value)
    asked.tokens.SetInParent()
    return asked
