"""What a request asks for by name and JSON value, as fields of ``outrider.v1``.

The names are vLLM's, which the wire has too, and the wire's own. Triton's examples write numbers as texts: a text that
spells a value of its field's type counts as that value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from outrider.runtime.core.checks.options import check_text
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.v1 import inference_pb2 as wire

MOST_JSON = 1 << 18
"""Bytes of JSON: room for all that the limits of a request allow, read in some milliseconds."""
# What a request says by other means, and what no output of this protocol would show.
_NO_OPTIONS = {
    "request_id", "text", "tokens", "chat", "model", "sampling", "speculation", "prompt_logprobs", "return_provenance",
    "return_trace",
}  # fmt: skip
_OF_REQUEST = {
    field.name: field
    for field in wire.GenerateRequest.DESCRIPTOR.fields
    if field.name not in _NO_OPTIONS
}
_OF_SAMPLING = wire.Sampling.DESCRIPTOR.fields_by_name
_OF_SPECULATION = wire.Speculation.DESCRIPTOR.fields_by_name
_TRUTHS = {"true": True, "false": False}
# vLLM's way to ask for no top-k.
_NO_TOP_K = (-1, "-1")
_MOST_NAME = 64


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


def add_options(request: wire.GenerateRequest, given: Mapping[str, Any]) -> None:
    """Set the fields of a request that are asked for by name; null is as not given.

    Raises:
        RequestError: no field has such a name, or the value is none of the field's.
    """
    for name, value in given.items():
        if value is None:
            continue
        if name == "top_k" and value in _NO_TOP_K:
            value = 0
        if name == "speculation":
            _add_speculation(request.speculation, value)
        elif name in _OF_SAMPLING:
            _set(request.sampling, _OF_SAMPLING[name], value, f"sampling.{name}")
        elif name in _OF_REQUEST:
            _set(request, _OF_REQUEST[name], value, name)
        else:
            raise _unknown("sampling_parameters", name)


def _add_speculation(speculation: wire.Speculation, given: object) -> None:
    if not isinstance(given, dict):
        raise RequestError("speculation", "must be a JSON object")
    for name, value in given.items():
        if name not in _OF_SPECULATION:
            raise _unknown("speculation", name)
        if value is not None:
            _set(speculation, _OF_SPECULATION[name], value, f"speculation.{name}")


def _unknown(path: str, name: str) -> UnsupportedOption:
    # A caller's own text, and no name, may be a part of his prompt.
    is_name = name.isascii() and name.isidentifier() and len(name) <= _MOST_NAME
    return UnsupportedOption(f"{path}.{name}" if is_name else path, "there is no such option")


def _set(message: Message, field: FieldDescriptor, value: Any, path: str) -> None:
    """Set a field to a JSON value.

    Raises:
        RequestError: naming the path, the value is none of the field's.
    """
    try:
        fitting = _fitting(field, value)
        message.MergeFrom(type(message)(**{field.name: fitting}))
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise RequestError(path, f"must be {_kind(field)}") from error


def _fitting(field: FieldDescriptor, value: Any) -> Any:
    """Return the value that a message takes; raises what it raises itself for others."""
    one = _ONE.get(field.cpp_type, _whole)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {int(key): _float(number) for key, number in _object(value).items()}
    if field.message_type is not None:
        return wire.TokenIds(ids=[_whole(number) for number in _list(value)])
    if field.is_repeated:
        # A string is a sequence of strings, too: its letters.
        return [value] if isinstance(value, str) else [one(element) for element in _list(value)]
    if field.name == "json_schema" and isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if field.enum_type is not None:
        return wire.ExactnessMode.Value(f"EXACTNESS_MODE_{_string(value).upper()}")
    return one(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        return _TRUTHS[_string(value).lower()]
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_ONE: Mapping[int, Callable[[Any], Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: _truth,
    FieldDescriptor.CPPTYPE_DOUBLE: _float,
    FieldDescriptor.CPPTYPE_STRING: _string,
}
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_ENUM: "max_accept, seed_stable or lenient",
}


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "an object of numbers by token id"
    if field.message_type is not None:
        return "a list of token ids"
    kind = _KINDS.get(field.cpp_type, "a whole number within its field's range")
    return f"a list, each {kind}" if field.is_repeated else kind
