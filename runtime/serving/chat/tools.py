"""The tools of a conversation, and the grammar of answers that call them.

The grammar is one of Lark as llguidance takes it. Calls have the one spelling of their format, and arguments that of
Python's JSON, which templates write too: what a schema leaves no choice about is forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.runtime.core.checks.rules import check_count, check_range, check_text
from outrider.runtime.core.errors import RequestError, UnsupportedOption
from outrider.runtime.core.params import GrammarKind
from outrider.runtime.grammar.library import SPACES, closed
from outrider.runtime.serving.chat.conversation import TOOLS_FIELD
from outrider.runtime.serving.chat.formats import AnswerFormat, CallFormat
from outrider.v1 import inference_pb2 as wire

CHOICE_FIELD = "chat.tool_choice"
NAME_FIELD = "chat.tool_name"
REASONING_FIELD = "chat.max_reasoning_tokens"
AUTO, REQUIRED = "auto", "required"
CHOICES = ("", AUTO, REQUIRED)
GRAMMARS = 8
"""A grammar of tools may have so many times the bytes of another: a caller has many tools, and the schema of each."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_TOOLS = 128
"""As many as OpenAI takes."""
_MOST_READ = 16
_BREAK = r'"\n\n"?'
_ODD = re.compile(r"\\[bB1-9]|\(\?[=!<]")
_TO_ESCAPE = re.compile(r"\\.|[/\n]", re.DOTALL)
# Of regular expressions, and the slash around them.
_SIGNS = re.compile(r"[\\/.+*?()|\[\]{}^$#&~-]")


@dataclass(frozen=True, slots=True)
class Tool:
    """What may be called.

    Attributes:
        name: of the function.
        schema: JSON schema of its arguments.
        is_strict: whether all of the schema is kept, or refused.
        index: its place among the tools.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    index: int


def check_choice(chat: wire.Chat, known: AnswerFormat, max_bytes: int) -> None:
    """Refuse a choice of tools that is none, or that this bundle's answers cannot keep.

    Args:
        chat: of the request.
        known: format of the answers.
        max_bytes: of tools that may be called.

    Raises:
        RequestError: it names no tool of the request, or a tool is not what it should be.
        UnsupportedOption: the format of calls is not known.
    """
    choice = chat.tool_choice
    if choice not in CHOICES:
        raise RequestError(CHOICE_FIELD, f"must be {AUTO} or {REQUIRED}, or left out")
    if chat.tool_name and choice != REQUIRED:
        raise RequestError(NAME_FIELD, f"needs tool_choice {REQUIRED}")
    if choice == REQUIRED:
        if not chat.tools_json:
            raise RequestError(CHOICE_FIELD, "needs tools to call")
        if known.calls is None:
            rule = "needs a chat template whose format of calls is known; use auto or none"
            raise UnsupportedOption(CHOICE_FIELD, rule)
        if chat.continue_final_message and known.content:
            rule = "must be auto or none with continue_final_message, which goes on within content"
            raise RequestError(CHOICE_FIELD, rule)
    if choice and chat.tools_json and known.calls is not None:
        check_text(TOOLS_FIELD, chat.tools_json, max_bytes)
        names = [one.name for one in tools_of(chat.tools_json)]
        if chat.tool_name and chat.tool_name not in names:
            raise RequestError(NAME_FIELD, "must be the name of one of the tools")


def check_reasoning(chat: wire.Chat, known: AnswerFormat, max_tokens: int) -> None:
    """Refuse a bound on reasoning that is too large, or that this bundle's answers cannot keep.

    Raises:
        RequestError: it is beyond the tokens of an answer.
        UnsupportedOption: where reasoning stands is not known.
    """
    if not chat.HasField("max_reasoning_tokens"):
        return
    if known.reasoning is None:
        rule = "needs a chat template whose marks of reasoning are known; leave it out"
        raise UnsupportedOption(REASONING_FIELD, rule)
    check_range(REASONING_FIELD, chat.max_reasoning_tokens, 0, max_tokens)
    if chat.continue_final_message:
        rule = "must be left out with continue_final_message, which may go on within reasoning"
        raise RequestError(REASONING_FIELD, rule)


def has_several_calls(chat: wire.Chat) -> bool:
    """Return whether an answer may have several calls."""
    if chat.HasField("parallel_tool_calls"):
        return chat.parallel_tool_calls
    return chat.tool_choice == AUTO


@lru_cache(_MOST_READ)
def tools_of(text: str) -> tuple[Tool, ...]:
    """Return the tools of a JSON text.

    Raises:
        RequestError: it is none, or a tool has no name or schema of its own.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(TOOLS_FIELD, "must be JSON, an array") from error
    if not isinstance(values, list) or not values:
        raise RequestError(TOOLS_FIELD, "must be a JSON array of objects")
    check_count(TOOLS_FIELD, values, MOST_TOOLS)
    tools = tuple(_tool(index, one) for index, one in enumerate(values))
    if len({one.name for one in tools}) < len(tools):
        raise RequestError(TOOLS_FIELD, "must have each name once")
    return tools


def _tool(index: int, value: Any) -> Tool:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise RequestError(TOOLS_FIELD, "must be a JSON array of objects")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "must each have a name of 1..64 letters, digits, underscores, dots and dashes"
        raise RequestError(TOOLS_FIELD, rule)
    schema = {"properties": {}} if schema is None or schema == {} else schema
    if not isinstance(schema, dict) or not _takes_objects(schema.get("type", "object")):
        rule = "must each have parameters that are a JSON schema of an object"
        raise RequestError(TOOLS_FIELD, rule)
    return Tool(name, {**schema, "type": "object"}, function.get("strict") is True, index)


def _takes_objects(kind: Any) -> bool:
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


@lru_cache(_MOST_READ)
def tools_grammar(
    text: str,
    known: AnswerFormat,
    choice: str,
    name: str,
    *,
    is_single: bool,
    is_thinking: bool = False,
    max_reasoning: int | None = None,
    schema: str = "",
    allows_whitespace: bool = True,
) -> str:
    """Return the grammar of answers that may call tools, or must.

    Args:
        text: JSON array of the tools.
        known: has a format of calls.
        choice: ``AUTO`` or ``REQUIRED``.
        name: of the one tool that is called, once; empty for any.
        is_single: whether one call is all.
        is_thinking: whether the answer begins within reasoning.
        max_reasoning: tokens of reasoning at most; None for any.
        schema: of an answer without calls; empty for any text.
        allows_whitespace: of that schema.

    Raises:
        RequestError: the schema is no JSON.
    """
    calls = known.calls
    assert calls is not None
    tools = [one for one in tools_of(text) if name in ("", one.name)]
    written = _Writer(known, tools, is_single=is_single or bool(name))
    if choice == REQUIRED:
        answer = written.called(calls)
    elif schema:
        content = _answer_schema(schema, allows_whitespace=allows_whitespace)
        begun = written.text(known.content)
        answer = f"({begun} %json {content} | {written.called(calls)})"
    else:
        answer = f"({written.free(calls)})"
    banned = {*known.special_ids, *known.ids.values()}
    thought = written.thought(max_reasoning, is_thinking=is_thinking, banned=banned)
    return written.whole(f"{thought}{answer}")


def reasoning_grammar(known: AnswerFormat, max_reasoning: int, *, is_thinking: bool) -> str:
    """Return the grammar of answers whose reasoning is bounded, and of any text behind it.

    Args:
        known: has marks of reasoning.
        max_reasoning: tokens between the marks at most.
        is_thinking: whether the answer begins within reasoning.
    """
    assert known.reasoning is not None
    written = _Writer(known, (), is_single=True)
    # A second beginning would have no bound.
    written.rules["rest"] = (
        f"{written.text(known.content)} TEXT?"
        if known.content
        else f"<[^{known.ids[known.reasoning[0]]}]>*"
    )
    return written.whole(f"{written.thought(max_reasoning, is_thinking=is_thinking)}rest")


@lru_cache(_MOST_READ)
def form_grammar(known: AnswerFormat, kind: str, text: str, *, allows_whitespace: bool) -> str:
    """Return the grammar of answers of a form, where a mark stands in front of contents.

    Args:
        known: has channels.
        kind: a JSON schema or a regular expression.
        text: of the form.
        allows_whitespace: of a schema.

    Raises:
        RequestError: the schema is no JSON.
    """
    written = _Writer(known, (), is_single=True)
    if kind == GrammarKind.JSON_SCHEMA:
        form = f"%json {_answer_schema(text, allows_whitespace=allows_whitespace)}"
    else:
        form = "FORM"
        written.rules[form] = f"/{_TO_ESCAPE.sub(_escaped, text)}/"
    return written.whole(f"{written.text(known.content)} {form}")


def _escaped(found: re.Match[str]) -> str:
    """Return a letter of an expression, or one with its escape, as it may stand between slashes."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0][-1], found[0])


def _answer_schema(schema: str, *, allows_whitespace: bool) -> str:
    """Return a schema with the bounds on white space that it would have alone."""
    try:
        found = json.loads(closed(schema))
    except (ValueError, RecursionError) as error:
        raise RequestError("json_schema", "must be JSON") from error
    if isinstance(found, dict):
        own = found.get("x-guidance")
        own = own if isinstance(own, dict) else {}
        spaces = {**SPACES, **own} if allows_whitespace else {**own, "whitespace_flexible": False}
        found["x-guidance"] = spaces
    return json.dumps(found)


class _Writer:
    """Writes parts of a grammar; ``rules`` has by name what these need."""

    def __init__(self, known: AnswerFormat, tools: Sequence[Tool], *, is_single: bool) -> None:
        self._known = known
        self._tools = tools
        self._is_single = is_single
        self._marks = re.compile(f"({'|'.join(map(re.escape, known.ids)) or '(?!)'})")
        self.rules = {"TEXT": "/(?s:.*)/"}

    def text(self, text: str) -> str:
        """Return a text, with its tokens that no plain text stands for."""
        ids, parts = self._known.ids, self._marks.split(text)
        found = (f"<[{ids[one]}]>" if one in ids else json.dumps(one) for one in parts if one)
        return " ".join(found)

    def called(self, calls: CallFormat) -> str:
        """Return calls, from the trigger on."""
        return f"{self.text(calls.trigger)} {self._behind_trigger(calls)}"

    def free(self, calls: CallFormat) -> str:
        """Return any text, or calls: a text that has their beginning is one."""
        if self._known.content:
            return f"{self.text(self._known.content)} TEXT? | {self.called(calls)}"
        found = ["FREE"]
        whole = calls if calls.is_whole else calls.bare
        without = []
        if not calls.is_whole:
            trigger = _pattern(calls.trigger)
            without.append(f"(?s:.*){trigger}(?s:.*)")
            self.rules["begun[lazy]"] = f"/(?s:.*){trigger}/"
            found.append(f"begun {self._behind_trigger(calls)}")
            if calls.trigger in self._known.ids:
                found.append(f"FREE? {self.called(calls)}")
        if whole is not None:
            # Up to the arguments, so that an object of the same names is text.
            heads = [
                _pattern(whole.begin + whole.open + one.name + whole.middle) for one in self._tools
            ]
            without.append(f"({'|'.join(heads)})(?s:.*)")
            self.rules |= {f"head_{i}[lazy]": f"/{head}/" for i, head in enumerate(heads)}
            rest = f"{self.text(whole.close)} {self._tail(whole)}"
            found += [
                f"head_{i} {self._arguments(one)} {rest}" for i, one in enumerate(self._tools)
            ]
        self.rules["FREE"] = "/(?s:.*)/" + "".join(f" & ~/{one}/" for one in without)
        return " | ".join(found)

    def whole(self, start: str) -> str:
        """Return a grammar with the rules that it needs."""
        return "\n".join(f"{name}: {body}" for name, body in {"start": start, **self.rules}.items())

    def thought(self, most: int | None, *, is_thinking: bool, banned: Collection[int] = ()) -> str:
        """Return the reasoning in front of an answer: what is left of it, or one that need not be there.

        Args:
            most: tokens of it; None for any.
            is_thinking: whether the answer begins within it.
            banned: tokens that are none of it where it is bounded.
        """
        if self._known.reasoning is None:
            return ""
        opened, closed = map(self.text, self._known.reasoning)
        text = "TEXT?"
        if most is not None:
            ends = sorted({*banned, self._known.ids[self._known.reasoning[1]]})
            text = f"<[^{','.join(map(str, ends))}]>{{0,{most}}}" if most else ""
        rest = f"{text} {closed} {self.text(self._known.turn) or _BREAK} "
        return rest if is_thinking else f"({opened} {rest})? "

    def _behind_trigger(self, calls: CallFormat) -> str:
        rest = (calls.begin + calls.open).removeprefix(calls.trigger)
        return f"{self.text(rest)} {self._tool(calls)} {self._tail(calls)}"

    def _tail(self, calls: CallFormat) -> str:
        """Return what follows a call."""
        if self._is_single:
            return self.text(calls.end)
        return (
            f"({self.text(calls.between + calls.open)} {self._tool(calls)})* {self.text(calls.end)}"
        )

    def _tool(self, calls: CallFormat) -> str:
        """Return the name of the rule for the rest of a call, from the tool's name on."""
        name = f"tool_{calls.name.replace('.', '_')}"
        if name not in self.rules:
            close = self.text(calls.close)
            self.rules[name] = " | ".join(
                f"{self.text(one.name + calls.middle)} {self._arguments(one)} {close}"
                for one in self._tools
            )
        return name

    def _arguments(self, tool: Tool) -> str:
        """Return the name of the rule for a tool's arguments; refusals of it are known by the name."""
        name = f"arguments_{tool.index}"
        if name not in self.rules:
            guidance = _SPELLING if tool.is_strict else {**_SPELLING, "lenient": True}
            schema = tool.schema if tool.is_strict else without_odd_patterns(tool.schema)
            text = closed(json.dumps({**schema, "x-guidance": guidance}))
            self.rules[name] = f"%json {text}"
        return name


def without_odd_patterns(schema: Any) -> Any:
    """Return a schema without regular expressions that look around or back: no grammar has those."""
    if isinstance(schema, list):
        return [without_odd_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: without_odd_patterns(value)
        for name, value in schema.items()
        if name != "pattern" or not isinstance(value, str) or not _ODD.search(value)
    }


def _pattern(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return _SIGNS.sub(r"\\\g<0>", text).replace("\n", r"\n")
