"""White space between the parts of JSON is bounded: a model that likes blanks still ends its answer."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer
from outrider.runtime.grammar import library

from tests.mutants import assert_caught

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
COMPACT = '{"a":1,"b":[1,2]}'
VALUE = json.loads(COMPACT)
# As models and libraries write it.
WRITTEN = [
    COMPACT,
    json.dumps(VALUE),
    json.dumps(VALUE, indent=2),
    json.dumps(VALUE, indent=8),
    json.dumps(VALUE, indent="\t"),
    '{ "a" : 1 , "b" : [ 1 , 2 ] }',
]
# Prefixes, each longer by one blank than what is allowed.
ENDLESS = ['{"a":  ', "{\n\n", "{ \n", "{\n" + " " * 65, "{\n" + "\t" * 33, '{"a":\n \t', "{\r"]


def accepted(text: str, *, allows_whitespace: bool = True, schema: str = SCHEMA) -> int:
    """Bytes of a text that the schema allows."""
    matcher = library.compiled(
        LLTokenizer("byte"), "json_schema", schema, allows_whitespace=allows_whitespace
    )
    taken: int = matcher.validate_tokens(list(text.encode()))
    return taken


def check_bounds() -> None:
    for text in ENDLESS:
        assert accepted(text) == len(text) - 1, text


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_usual_is_allowed(text: str) -> None:
    assert accepted(text) == len(text)
    assert (accepted(text, allows_whitespace=False) == len(text)) == (text == COMPACT)


def test_no_more_than_a_space_or_an_indent_is() -> None:
    check_bounds()


def test_a_schema_may_say_otherwise_itself() -> None:
    own = json.dumps({**json.loads(SCHEMA), "x-guidance": {"whitespace_pattern": "[ ]{0,3}"}})
    text = '{"a":   1,"b":[]}'
    assert accepted(text, schema=own) == len(text)


def test_a_missing_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        monkeypatch,
        library,
        "SPACES if allows_whitespace",
        "None if allows_whitespace",
        check_bounds,
    )
