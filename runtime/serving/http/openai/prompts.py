"""The prompts of a completion: one or several, of text or of token ids."""

from __future__ import annotations

from typing import Any

from outrider.runtime.core.checks.options import check_count
from outrider.runtime.core.checks.validate import check_prompt_size
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.http.openai.json_types import is_ids
from outrider.runtime.serving.loaded_model import LoadedModel

MAX_PROMPTS = 256
"""Prompts of one request; each is a generation request."""
_RULE = "must be a string, an array of strings, an array of token ids or an array of those"


def prompts_of(value: Any, serving: LoadedModel) -> list[dict[str, Any]]:
    """Return the prompts as fields ``text`` or ``tokens``; ids are not checked yet.

    Raises:
        RequestError: it is none, or there are too many.
        ContextTooLong: one of token ids is too long.
    """
    if value is None:
        raise RequestError("prompt", f"is required, and {_RULE}")
    if isinstance(value, str):
        return [{"text": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt", _RULE)
    if type(value[0]) is int:
        check_prompt_size(len(value), serving.model)
        value = [value]
    check_count("prompt", value, MAX_PROMPTS)
    return [_prompt(one, serving) for one in value]


def _prompt(value: Any, serving: LoadedModel) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list):
        check_prompt_size(len(value), serving.model)
    if not is_ids(value):
        raise RequestError("prompt", _RULE)
    return {"tokens": tuple(value)}
