"""What a request asks for by name and JSON value, as fields of ``outrider.v1``.

The names are vLLM's, which the wire has too, and the wire's own. Triton's examples write numbers as texts: a text that
spells a value of its field's type counts as that value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.rules import check_text
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.json_fields import JsonFields, unknown_option
from outrider.v1 import inference_pb2 as wire

MOST_JSON = 1 << 18
"""Bytes of JSON: room for all that the limits of a request allow, read in some milliseconds."""
# What a request says by other means, and what no output of this protocol would show.
_NO_OPTIONS = {
    "request_id", "text", "tokens", "chat", "model", "sampling", "speculation", "prompt_logprobs", "return_provenance",
    "return_trace",
}  # fmt: skip
_NAMES = frozenset(wire.GenerateRequest.DESCRIPTOR.fields_by_name) - _NO_OPTIONS


def read_options(text: str) -> dict[str, Any]:
    """Return the values of a JSON object by name.

    Raises:
        RequestError: the text is none, or a long one.
    """
    name = "sampling_parameters"
    check_text(name, text, MOST_JSON)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(name, "must be JSON") from error
    if not isinstance(given, dict):
        raise RequestError(name, "must be a JSON object")
    return given


def add_options(
    request: wire.GenerateRequest, given: Mapping[str, Any], rules: RequestRules
) -> None:
    """Set the fields of a request that are asked for by name; null is as not given.

    Raises:
        RequestError: no field has such a name, or the value is none of the field's.
    """
    fields = JsonFields(request, rules, _NAMES, reads_texts=True)
    # A map on the wire has no order: of several that are wrong, the same one is named every time.
    for name, value in sorted(given.items()):
        if value is not None and not fields.set(name, value):
            raise unknown_option("sampling_parameters", name)
