"""Objects of a schema have the properties that it names: a weak model adds others until its answer is full."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider.runtime.grammar import library
from outrider.runtime.grammar.library import closed

from tests.mutants import assert_caught
from tests.runtime.grammar.test_white_space import accepted

A = {"a": {"type": "integer"}}
OBJECT: dict[str, Any] = {"type": "object", "properties": A, "required": ["a"]}
SHUT = {"additionalProperties": False}
NAMED = {"type": "object", "properties": {"properties": {"type": "string"}}}
CLOSED: list[tuple[Any, Any]] = [
    (OBJECT, OBJECT | SHUT),
    ({"type": "array", "items": OBJECT}, {"type": "array", "items": OBJECT | SHUT}),
    (NAMED, NAMED | SHUT),
    (
        {"anyOf": [OBJECT, {"type": "null"}], "$defs": {"one": OBJECT}},
        {"anyOf": [OBJECT | SHUT, {"type": "null"}], "$defs": {"one": OBJECT | SHUT}},
    ),
]
# What has said which properties there are; what needs others; what holds no schema; and what combines several.
KEPT: list[Any] = [
    OBJECT | {"additionalProperties": True},
    OBJECT | {"additionalProperties": {"type": "string"}},
    OBJECT | {"patternProperties": {"^x": {"type": "string"}}},
    OBJECT | {"minProperties": 2},
    OBJECT | {"required": ["a", "b"]},
    {"type": "object"},
    {"const": {"properties": {}}},
    {"enum": [{"properties": {}}]},
    {"type": "object", "allOf": [OBJECT, {"properties": {"b": {}}}]},
    OBJECT | {"anyOf": [{"properties": {"b": {"type": "integer"}}}]},
    {"$defs": {"one": OBJECT}, "properties": {"b": {}}, "$ref": "#/$defs/one"},
    {"properties": 3},
    [1, "a", None],
    True,
]


def check() -> None:
    for schema, expected in CLOSED:
        assert json.loads(closed(json.dumps(schema))) == expected
    for schema in KEPT:
        assert json.loads(closed(json.dumps(schema))) == schema


def test_objects_are_closed_where_a_schema_says_nothing_of_it() -> None:
    check()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"minimum": 1e999}', '{"required": 3}'])
def test_what_is_no_schema_is_left_to_the_library(text: str) -> None:
    assert closed(text) == text


def test_an_answer_has_no_further_property() -> None:
    text = '{"a": 1, "b": 2}'
    schema = json.dumps(OBJECT)
    assert accepted(text, schema=schema) == text.index(",")
    assert accepted(text, schema=json.dumps(OBJECT | {"additionalProperties": True})) == len(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("part.keys() & _COMBINING or", ""),
        ('("properties" in part and part.keys() & _ALTERNATIVES)', "False"),
        ("not part.keys() & _OPEN", "True"),
        ("and {*required} <= names.keys()", ""),
        ("elif key not in _VALUES:", "else:"),
        ("if key in _MAPS and isinstance(value, dict):", "if False:"),
    ],
)
def test_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    assert_caught(monkeypatch, library, old, new, check)
