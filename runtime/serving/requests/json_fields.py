"""Sets the fields of a request to JSON values, by the names and types of the wire.

A wrong type is refused by the field and the rule; bounds are the table's (``fields``), which says so too where a number
does not even fit the wire. The parts of ``sampling`` stand at the top, as vLLM has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.serving.requests import json_types
from outrider.runtime.serving.requests.bounds import Entries, RequestRules
from outrider.runtime.serving.requests.fields import FIELDS
from outrider.v1 import inference_pb2 as wire

_OF_REQUEST: Any = wire.GenerateRequest.DESCRIPTOR.fields_by_name
_OF_SAMPLING: Any = wire.Sampling.DESCRIPTOR.fields_by_name
_OF_SPECULATION: Any = wire.Speculation.DESCRIPTOR.fields_by_name
# vLLM's way to ask for no top-k.
_NO_TOP_K = (-1, "-1")
_MOST_NAME = 64
_KINDS: Mapping[int, json_types.Kind] = {
    FieldDescriptor.CPPTYPE_BOOL: json_types.flag,
    FieldDescriptor.CPPTYPE_DOUBLE: json_types.number,
    FieldDescriptor.CPPTYPE_STRING: json_types.text,
    FieldDescriptor.CPPTYPE_ENUM: json_types.mode,
}
_RANGES: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "[-2147483648, 2147483647]",
    FieldDescriptor.CPPTYPE_UINT32: "[0, 4294967295]",
    FieldDescriptor.CPPTYPE_UINT64: "[0, 18446744073709551615]",
}
_TRUTHS = {"true": True, "false": False}
_SPELLED: Mapping[json_types.Kind, Callable[[str], Any]] = {
    json_types.flag: lambda text: _TRUTHS.get(text.lower(), text),
    json_types.number: float,
    json_types.count: int,
}


class JsonFields:
    """Sets the fields of one request.

    Args:
        request: to set fields of.
        rules: of the server.
        names: of ``GenerateRequest`` that may be set; those of ``Sampling`` always may.
        reads_texts: whether a text that spells a number, true or false counts as that value.
    """

    def __init__(
        self,
        request: wire.GenerateRequest,
        rules: RequestRules,
        names: frozenset[str],
        *,
        reads_texts: bool = False,
    ) -> None:
        self._request = request
        self._rules = rules
        self._names = names
        self._reads_texts = reads_texts

    def set(self, name: str, value: Any) -> bool:
        """Set a field; null is as not given. Return whether there is one of this name.

        Raises:
            RequestError: the value is none of the field's.
        """
        request = self._request
        if name in _OF_SAMPLING:
            if name == "top_k" and value in _NO_TOP_K:
                value = 0
            self._set(request.sampling, _OF_SAMPLING[name], f"sampling.{name}", value)
        elif name == "speculation":
            self._set_speculation(value)
        elif name in self._names:
            self.set_field(name, value)
        else:
            return False
        return True

    def set_field(self, name: str, value: Any) -> None:
        """Set a field of ``GenerateRequest``, as ``set`` does, whether or not it may be set by its name."""
        self._set(self._request, _OF_REQUEST[name], name, value)

    def _set_speculation(self, given: Any) -> None:
        if given is None:
            return
        for name, value in json_types.mapping("speculation", given).items():
            if name not in _OF_SPECULATION:
                raise unknown_option("speculation", name)
            path = f"speculation.{name}"
            self._set(self._request.speculation, _OF_SPECULATION[name], path, value)

    def _set(self, message: Message, field: FieldDescriptor, path: str, value: Any) -> None:
        if value is None:
            return
        if (given := other_given(message, field)) is not None:
            raise RequestError(path, f"must not stand beside {given}")
        bound = FIELDS[path].bound
        if isinstance(bound, Entries) and isinstance(value, (list, dict)):
            # Before they are looked at: megabytes of them take the event loop's time.
            check_count(path, value, bound.most(self._rules))
        kind = kind_of(field)
        fitting = kind(path, _spelled(kind, value) if self._reads_texts else value)
        try:
            put(message, field, fitting)
        except UnicodeEncodeError as error:
            raise RequestError(path, "must be UTF-8, of whole characters") from error
        except ValueError as error:
            if bound is not None:
                bound.check(path, fitting, self._rules)
            rule = f"must be in {_RANGES.get(field.cpp_type, 'the range of its field')}"
            raise RequestError(path, rule) from error


def other_given(message: Message, field: FieldDescriptor) -> str | None:
    """Return the field that is set already of those that exclude this one; None where none is."""
    oneof = field.containing_oneof
    given = None if oneof is None else message.WhichOneof(oneof.name)
    return None if given == field.name else given


def kind_of(field: FieldDescriptor) -> json_types.Kind:
    """Return what takes a field's values of JSON."""
    if field.message_type is not None:
        is_map = field.message_type.GetOptions().map_entry
        return json_types.biases if is_map else json_types.ids
    if field.name == "json_schema":
        return json_types.text_or_object
    kind = _KINDS.get(field.cpp_type, json_types.count)
    if field.is_repeated:
        return json_types.text_or_texts if kind is json_types.text else json_types.ids
    return kind


def put(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Set a field to a value of its kind.

    Raises:
        ValueError: a number does not fit the field.
    """
    if isinstance(value, dict):
        getattr(message, field.name).update(value)
    elif field.message_type is not None:
        ids = getattr(message, field.name)
        ids.SetInParent()
        ids.ids.extend(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


def unknown_option(path: str, name: str) -> UnsupportedOption:
    """Return the refusal of an option that does not exist; a name that may be a part of a prompt is not in it."""
    is_name = name.isascii() and name.isidentifier() and len(name) <= _MOST_NAME
    return UnsupportedOption(f"{path}.{name}" if is_name else path, "there is no such option")


def _spelled(kind: json_types.Kind, value: Any) -> Any:
    """Return the value that a text stands for, also within lists and objects; others as they are."""
    if kind is json_types.ids and isinstance(value, list):
        return [_spelled(json_types.count, one) for one in value]
    if kind is json_types.biases and isinstance(value, dict):
        return {name: _spelled(json_types.number, one) for name, one in value.items()}
    if isinstance(value, str) and kind in _SPELLED:
        try:
            return _SPELLED[kind](value)
        except ValueError:
            return value
    return value
