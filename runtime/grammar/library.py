"""llguidance, an optional library: a tokenizer and a grammar in, a matcher out.

Loads nothing else, so that the process that compiles strangers' grammars stays small. The library never raises for a
grammar that is wrong: whatever it is asked, ``is_error`` has to be looked at afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL = "llguidance is not installed at the server: pip install 'outrider-server[grammar]'"
MOST_RULE = 160
"""Characters of the library's own words in a refusal: they may quote the whole grammar."""
_HIDDEN = "..."
# Of a grammar that tools were made into: the line that is wrong, and whose schema stands in it.
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_WHOSE = re.compile(r"arguments_(\d+): %json |start: .*%json ")
_UNKEPT = re.compile(r"Unimplemented keys: \[(.*)\]")
# Of JSON Schema and Lark: a refusal may name them, whoever wrote them.
_KEYWORDS = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "array",
        "boolean",
        "const",
        "contains",
        "contentEncoding",
        "contentMediaType",
        "default",
        "definitions",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "integer",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "null",
        "number",
        "object",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "start",
        "string",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "$ref",
        "ignore",
        "import",
        "lazy",
        "regex",
        "grammar",
        "rule",
        "terminal",
        "group",
        "expression",
    ]
)
# One to two KiB each: with the library's own bound of 250,000 a request could take half a GiB.
_MOST_LEXER_STATES = 20_000
_MOST_SYMBOLS = 100_000


# Keywords of JSON Schema: what makes one schema of several, what says which properties there are, what holds schemas
# by name, and what holds values.
_ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
_COMBINING = {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
_OPEN = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_VALUES = {"const", "enum", "default", "examples", "x-guidance"}

# Between two parts of JSON: one space, or a new line with its indent. Without a bound a weak model writes spaces until
# its answer is full.
SPACES = {"whitespace_pattern": r" |\n( {0,64}|\t{0,32})"}


class GrammarError(ValueError):
    """A grammar cannot be used; the text says why, short enough for a caller."""


def is_installed() -> bool:
    """Return whether grammars can be served at all."""
    return importlib.util.find_spec("llguidance") is not None


def open_tokenizer(description: str, vocab_size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """Return the library's view of a tokenizer; holds the interpreter for up to seconds.

    Args:
        description: the contents of a ``tokenizer.json``.
        vocab_size: V of the model, at least the tokenizer's.
        end_ids: tokens that end an answer, at least one.

    Raises:
        ValueError: the library cannot read it.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(without_special_texts(description), n_vocab=vocab_size, eos_token=[*end_ids])


def without_special_texts(description: str) -> str:
    """Return a ``tokenizer.json`` whose special tokens no text spells.

    Else a grammar's text that happens to spell one, such as "<|endoftext|>", would force the token in its place. The
    library counts every added token like "<tool_call>" as special, and would then refuse it.
    """
    contents: dict[str, Any] = json.loads(description)
    for token in contents.get("added_tokens") or ():
        token["special"] |= token["content"].startswith("<") and token["content"].endswith(">")
    names = {
        token["content"]: f"\ufdd0{token['id']}\ufdd0"
        for token in contents.get("added_tokens") or ()
        if token["special"]
    }
    for token in contents.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    model = contents["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
    elif vocab is not None:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(contents)


def compiled(
    tokenizer: LLTokenizer, kind: str, text: str, *, allows_whitespace: bool, made_of: str = ""
) -> LLMatcher:
    """Return a matcher that has consumed nothing; other threads run meanwhile.

    Args:
        tokenizer: of the model.
        kind: value of a ``GrammarKind``.
        text: the schema, expression or grammar.
        allows_whitespace: of a schema: a space, or a new line with its indent, between two parts.
        made_of: field that the grammar was made of; empty where it is the caller's own.

    Raises:
        GrammarError: the grammar cannot be used.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        if kind == "json_schema":
            # Between the two lies what a schema says itself, in "x-guidance".
            defaults: Any = SPACES if allows_whitespace else None
            overrides: Any = None if allows_whitespace else {"whitespace_flexible": False}
            grammar = LLMatcher.grammar_from_json_schema(
                closed(text), defaults=defaults, overrides=overrides
            )
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        raise GrammarError(_short(str(error), text, made_of)) from error
    limits = LLParserLimits(
        max_lexer_states=_MOST_LEXER_STATES, max_grammar_size=_MOST_SYMBOLS, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error(), text, made_of))
    return matcher


def closed(text: str) -> str:
    """Return a JSON schema whose objects have the properties that they name and no others, where it says nothing of it.

    To JSON Schema such objects are open, and a weak model adds properties until its answer is full. What is shorter is
    valid for the schema too. One that combines schemas is left as it is: to close a part may leave nothing that fits.
    """
    try:
        schema = json.loads(text)
        left = [schema]
        while left:
            part = left.pop()
            if not isinstance(part, dict):
                left += part if isinstance(part, list) else ()
                continue
            if part.keys() & _COMBINING or ("properties" in part and part.keys() & _ALTERNATIVES):
                return text
            names, required = part.get("properties"), part.get("required", [])
            if isinstance(names, dict) and not part.keys() & _OPEN and {*required} <= names.keys():
                part["additionalProperties"] = False
            for key, value in part.items():
                if key in _MAPS and isinstance(value, dict):
                    left += value.values()
                elif key not in _VALUES:
                    left.append(value)
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return text


def _plain(text: str) -> str:
    """Return JSON as it is without escapes; anything else is empty."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""


def _repeats(word: str, given: str) -> bool:
    """Return whether a word is the caller's and not the language's; words of few letters say nothing."""
    bare = word.strip("\"'`.,:;!?()[]{}<>")
    return len(bare) > 3 and bare in given and bare not in _KEYWORDS


def _wrong_line(message: str, text: str) -> str:
    """Return the line of a grammar that a message of the library is about; empty where it names none."""
    place, lines = _PLACE.match(message), text.splitlines()
    return lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""


def _short(message: str, text: str, made_of: str) -> str:
    """Return what a message of the library says is wrong, without what it repeats of the grammar."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    told = next((line for line in lines if line.startswith("error: ")), lines[0])
    given = " ".join((text, unquote(text), _plain(text)))
    told = " ".join(
        _HIDDEN if _repeats(word, given) else word for word in told.removeprefix("error: ").split()
    )
    # A caller's own grammar may have rules of these names, and its places are his.
    whose = _WHOSE.match(_wrong_line(message, text)) if made_of else None
    if made_of:
        told = _PLACE.sub("", told, count=1)
    if found := _UNKEPT.fullmatch(told):
        names = found[1].replace('"', "")
        told = f'cannot keep {names}; leave it out, or say "x-guidance": {{"lenient": true}} and check answers'
    if whose is not None:
        part = "json_schema" if whose[1] is None else f"parameters of tools[{whose[1]}]"
        told = told if part == made_of else f"{part}: {told}"
    return told if len(told) <= MOST_RULE else told[: MOST_RULE - 3] + "..."
