"""Formats of calls: recognised in templates, written by a grammar, and read from texts however they are cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import GrammarKind, GrammarParams
from outrider.runtime.grammar.constraint import GrammarConstraint, GrammarConstraints
from outrider.runtime.serving.chat import answer
from outrider.runtime.serving.chat.answer import MOST_HEAD, TextReader
from outrider.runtime.serving.chat.formats import CALL_FORMATS, AnswerFormat, CallFormat, recognise
from outrider.runtime.serving.chat.tools import (
    AUTO,
    MOST_TOOLS,
    REQUIRED,
    reasoning_grammar,
    tools_grammar,
)
from outrider.runtime.serving.requests.json_types import json_text
from outrider.runtime.serving.tokenizer import TokenizersCodec

from tests.runtime.serving.chat.scripted import TOOLS
from tests.runtime.serving.chat.shapes import SHAPES, byte_tokenizer, template_of

NAMES = frozenset({"weather", "weather_more"})
IDS = {"<think>": 1, "</think>": 2}
THINK = ("<think>", "</think>")
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
BY_NAME = {one.name: one for one in CALL_FORMATS}
HERMES = BY_NAME["hermes"]
FIRST, SECOND = '{"city": "Rome"}', '{"a": 12, "b": 1}'


def written(calls: CallFormat) -> str:
    """Two calls as the format has them."""
    one = calls.open + "weather" + calls.middle + FIRST + calls.close
    other = calls.open + "weather_more" + calls.middle + SECOND + calls.close
    return calls.begin + one + calls.between + other + calls.end


def read(
    text: str, known: AnswerFormat, size: int, *, is_thinking: bool = False
) -> tuple[str, str, list[list[str]]]:
    """Content, reasoning and calls of a text that comes in pieces of a size."""
    reader = TextReader(known, NAMES, is_thinking=is_thinking)
    content, reasoning, calls = "", "", list[list[str]]()
    pieces = [*(text[i : i + size] for i in range(0, len(text), size)), ""]
    for index, piece in enumerate(pieces):
        parts = reader.feed(piece, is_last=index == len(pieces) - 1)
        content, reasoning = content + parts.text, reasoning + parts.reasoning
        for one in parts.calls:
            if one.name:
                assert len(one.id) == 9
                assert one.index == len(calls)
                calls.append([one.name, ""])
            calls[-1][1] += one.arguments
    return content, reasoning, calls


def parts(text: str, known: AnswerFormat, *, is_thinking: bool = False) -> object:
    """What ``read`` says, in pieces of any size."""
    found = [
        read(text, known, size, is_thinking=is_thinking) for size in (1, 2, 3, 7, len(text) + 1)
    ]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_calls_of_every_format_are_read_and_what_is_none_stays_text(calls: CallFormat) -> None:
    known, text = AnswerFormat(calls=calls), written(calls)
    both = [["weather", FIRST], ["weather_more", SECOND]]
    assert parts(text, known) == ("", "", both)
    assert parts(f"{text} after", known) == ("after", "", both)
    before = f"Hi \n{text}"
    assert parts(before, known) == ((before, "", []) if calls.is_whole else ("Hi", "", both))
    for other in (
        text.replace("weather", "season"),
        f"Hi {calls.trigger} you",
        calls.trigger + "x" * (MOST_HEAD + 1),
        calls.trigger[:-1],
    ):
        assert parts(other, known) == (other, "", [])
    cut = text[: text.index(FIRST) + 4]
    assert parts(cut, known) == ("", "", [["weather", FIRST[:4]]])
    for length in range(text.index(SECOND) + len(SECOND), len(text)):
        assert parts(text[:length], known) == ("", "", both)
    # Cut within the second one's head, and within the first one's.
    for length in range(text.index(FIRST) + len(FIRST), text.index(SECOND)):
        assert parts(text[:length], known) == ("", "", both[:1])
    for length in range(len(calls.trigger), 0 if calls.is_whole else text.index(FIRST)):
        assert parts(f"Hi {text[:length]}", known) == ("Hi", "", [])


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_no_run_of_spaces_is_tried_in_several_ways(calls: CallFormat) -> None:
    heads = answer._Heads(calls)
    for pattern in (heads.first.pattern, heads.next.pattern, heads.last.pattern):
        assert r"\s*\s*" not in pattern


def test_calls_without_marks_and_with_other_white_space_are_read() -> None:
    known = AnswerFormat(calls=HERMES)
    bare = f'{{"name": "weather", "arguments": {FIRST}}}'
    assert parts(bare, known) == ("", "", [["weather", FIRST]])
    assert parts(f" {bare}", known) == parts(bare, known)
    wide = '{\n  "name" :"weather",\n  "arguments":{ "city": "}\\"{" }\n}'
    assert parts(wide, known) == ("", "", [["weather", '{ "city": "}\\"{" }']])
    assert parts(f"<tool_call>{wide} </tool_call>", known) == parts(wide, known)
    for text in (f"It is {bare}", '{"name": "Ann", "arguments": {}}', '{"name": "weather"}', "{"):
        assert parts(text, known) == (text, "", [])


def test_a_grammar_of_many_tools_has_each_once() -> None:
    """As many rules as tools, and a length in proportion: all of them were written anew for each."""

    def grammar(num_tools: int) -> str:
        tools = [{"name": f"tool{index:03}", "parameters": {}} for index in range(num_tools)]
        known = AnswerFormat(calls=HERMES)
        return tools_grammar(json.dumps(tools), known, AUTO, "", is_single=False)

    few, many = grammar(8), grammar(MOST_TOOLS)
    assert many.count("%json") == MOST_TOOLS
    assert len(many) < 1.3 * MOST_TOOLS / 8 * len(few)
    with pytest.raises(RequestError, match=f"must have at most {MOST_TOOLS} entries"):
        grammar(MOST_TOOLS + 1)


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [
        (r"^[a-z]+$", True),
        (r"^(?!x)", False),
        (r"\bword", False),
        (r"(a)\1", False),
        (r"(?:a)", True),
    ],
)
def test_patterns_that_no_grammar_has_are_left_out(pattern: str, is_kept: bool) -> None:
    schema = {"type": ["object", "null"], "properties": {"a": {"pattern": pattern}}}
    for is_strict in (False, True):
        tools = json.dumps([{"name": "one", "parameters": schema, "strict": is_strict}])
        text = tools_grammar(tools, AnswerFormat(calls=HERMES), AUTO, "", is_single=True)
        assert (json.dumps(pattern) in text) is (is_kept or is_strict)


def test_reasoning_stands_in_front_and_has_no_calls() -> None:
    known = AnswerFormat(calls=HERMES, reasoning=THINK, ids=IDS)
    call = written(HERMES)
    calls = [["weather", FIRST], ["weather_more", SECOND]]
    assert parts(f"<think>\nhm {call} \n</think>\n\nyes", known) == ("yes", f"hm {call}", [])
    assert parts(f"\n<think>a\n\nb</think>\n{call}", known) == ("", "a\n\nb", calls)
    assert parts("no <think> here", known) == ("no <think> here", "", [])
    assert parts("<thin", known) == ("<thin", "", [])
    assert parts("\nhm</think>yes", known, is_thinking=True) == ("yes", "hm", [])
    assert parts("hm </thin", known, is_thinking=True) == ("", "hm </thin", [])


def test_tokens_of_reasoning_are_counted_with_its_marks() -> None:
    known = AnswerFormat(reasoning=THINK, ids=IDS)
    for is_thinking, batches, counts in (
        (False, [(1, 5), (6,), (7, 2, 8), (1, 9)], [2, 1, 2, 0]),
        (True, [(5,), (2,), (6,)], [1, 1, 0]),
        (False, [(5, 1), (6, 2)], [0, 0]),
        (False, [(), (1, 2, 3)], [0, 2]),
    ):
        reader = TextReader(known, frozenset(), is_thinking=is_thinking)
        assert [reader.count(one) for one in batches] == counts
    assert TextReader(AnswerFormat(), NAMES, is_thinking=False).count((1, 2)) == 0


@pytest.mark.parametrize(
    ("shape", "calls", "reasoning"),
    [
        ("qwen25", "hermes", None),
        ("qwen3", "hermes", THINK),
        ("llama3", "llama3", None),
        ("mistral", "mistral", None),
        ("deepseek", "deepseek_v3", THINK),
        ("gpt_oss", "harmony", ANALYSIS),
        ("granite", None, None),
        ("chatml", None, None),
    ],
)
def test_the_format_of_a_published_shape_is_recognised(
    shape: str, calls: str | None, reasoning: tuple[str, str] | None
) -> None:
    codec = TokenizersCodec(SHAPES[shape].tokenizer().to_str().encode())
    found = recognise([template_of(shape)], codec)
    assert (found.calls.name if found.calls else None) == calls
    assert found.reasoning == reasoning
    assert found.reads_tools == (shape not in ("chatml", "deepseek"))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call><function={{ tools }}>", None),
        ("{{ '[TOOL_CALLS][' }}", "mistral_tekken"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_v13"),
        ("{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' }}", None),
        ("respond with <|tool_call|> and a list", "granite"),
        ("<tool_call>[ ... ]</tool_call>", "smollm2"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v3.1"),  # noqa: RUF001
    ],
)
def test_other_formats_are_told_apart_by_what_templates_write(
    template: str, name: str | None
) -> None:
    found = recognise([template], TokenizersCodec(byte_tokenizer(["<s>"]).to_str().encode()))
    assert (found.calls.name if found.calls else None) == name


def with_channels() -> tuple[AnswerFormat, TokenizersCodec]:
    """The format of gpt-oss, and its tokens."""
    codec = TokenizersCodec(SHAPES["gpt_oss"].tokenizer().to_str().encode())
    return recognise([template_of("gpt_oss")], codec), codec


def test_messages_of_channels_are_reasoning_content_and_calls() -> None:
    known, _ = with_channels()
    thought, turn = "<|channel|>analysis<|message|>hm <|end|>", "<|start|>assistant"
    final = "<|channel|>final<|message|>"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + FIRST
    calls = [["weather", FIRST]]
    assert parts(f"{thought}{turn}{final}So: it rains", known) == ("So: it rains", "hm", [])
    assert parts(f"{thought}{turn}{thought}{turn}{final}x", known) == ("x", "hmhm", [])
    assert parts(f"{final} a <|end|>", known) == (" a <|end|>", "", [])
    assert parts(f"{thought}{turn}{call}", known) == ("", "hm", calls)
    assert parts(call, known) == ("", "", calls)
    # No call is in the content, and what is cut within marks is neither.
    assert parts(f"{final}{call}", known) == (call, "", [])
    tokens = re.findall(r"<\|\w+\|>|.", turn + final)
    for num in range(len(tokens) + 1):
        assert parts(thought + "".join(tokens[:num]), known) == ("", "hm", [])
    for text in ("{}", "<", "<|", "<|chan", " ", "\n\n"):
        assert parts(text, known) == (text, "", [])
    assert parts("<|channel|>", known) == parts("<|channel|>ana", known) == ("", "", [])


def test_other_heads_and_messages_of_channels_are_no_content() -> None:
    known, _ = with_channels()
    thought, turn = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant"
    aside, final = "<|channel|>commentary<|message|>I look. <|end|>", "<|channel|>final<|message|>"
    channel, calls = "<|channel|>commentary", [["weather", FIRST]]
    for head in (" <|constrain|>json", " json", ""):
        role = f" to=functions.weather{channel}{head}<|message|>"
        marked = f"{channel} to=functions.weather{head}<|message|>"
        for call in (role, marked):
            assert parts(call + FIRST, known) == ("", "", calls)
            assert parts(thought + turn + call + FIRST, known) == ("", "hm", calls)
            assert parts(aside + turn + call + FIRST, known) == ("", "I look.", calls)
        for length in range(len(" to=functions."), len(role) + 1):
            assert parts(thought + turn + role[:length], known) == ("", "hm", [])
    assert parts(aside + turn + final + "It rains.", known) == ("It rains.", "I look.", [])
    assert parts(thought + turn + aside, known) == ("", "hmI look.", [])
    for text in (" to=functions.season", "to", "to=functions", f"to=functions.x{channel} hm"):
        assert parts(text, known) == (text, "", [])


def test_a_call_of_channels_that_is_cut_in_its_head_leaves_no_marks() -> None:
    known, _ = with_channels()
    trigger, mark = BY_NAME["harmony"].trigger, "<|channel|>"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for length in range(1, len(trigger) + 1):
        cut = trigger[:length]
        # What is no whole mark was written as letters.
        content = "" if length >= len(mark) else cut
        assert parts(f"Hi {cut}", known) == (f"Hi {content}".rstrip(), "", [])
        if content == "":
            assert parts(cut, known) == ("", "", [])
            assert parts(thought + cut, known) == ("", "hm", [])
    assert parts(f"{trigger[:-1]} x", known) == (f"{trigger[:-1]} x", "", [])


def test_tokens_of_a_channel_s_reasoning_are_counted_with_its_marks() -> None:
    known, codec = with_channels()
    thought = codec.encode("<|channel|>analysis<|message|>hm<|end|>", False)
    rest = codec.encode("<|start|>assistant<|channel|>final<|message|>hm", False)
    for size in (1, 3, 100):
        reader, tokens, num = TextReader(known, NAMES, is_thinking=False), thought + rest, 0
        for begin in range(0, len(tokens), size):
            num += reader.count(tokens[begin : begin + size])
        assert num == len(thought)
    # As many messages of it as there are, and none behind the content.
    turn = codec.encode("<|start|>assistant", False)
    several = thought + turn + thought + turn + thought + rest + thought
    for size in (1, 3, 100):
        reader = TextReader(known, NAMES, is_thinking=False)
        pieces = [several[begin : begin + size] for begin in range(0, len(several), size)]
        assert sum(map(reader.count, pieces)) == 3 * len(thought)
    reader = TextReader(known, NAMES, is_thinking=False)
    assert sum(reader.count((token,)) for token in rest[-20:]) == 0


@pytest.mark.parametrize("most", [None, 0, 3])
def test_a_grammar_of_channels_has_reasoning_then_content_or_calls(most: int | None) -> None:
    known, codec = with_channels()
    tokenizer = SHAPES["gpt_oss"].tokenizer()
    end = tokenizer.token_to_id("<|return|>")
    vocab_size = tokenizer.get_vocab_size()
    constraints = GrammarConstraints(tokenizer.to_str().encode(), vocab_size, (end,))

    def takes(grammar: str, text: str) -> bool:
        params = GrammarParams(kind=GrammarKind.LARK, text=grammar)
        ids = [*codec.encode(text, False), end]
        return constraints.constraint(params).fits(ids) == len(ids)

    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + FIRST
    final = "<|channel|>final<|message|>Hi"
    tools = json_text("", TOOLS)
    form = json_text("", {"type": "object", "properties": {}, "additionalProperties": False})
    for choice, schema in ((AUTO, ""), (REQUIRED, ""), (AUTO, form)):
        grammar = tools_grammar(
            tools, known, choice, "", is_single=True, max_reasoning=most, schema=schema
        )
        for num in (0, 3, 4):
            thought = f"<|channel|>analysis<|message|>{'a' * num}<|end|><|start|>assistant"
            is_short = most is None or num <= most
            assert takes(grammar, thought + call) == is_short
            assert takes(grammar, thought + final) == (is_short and choice == AUTO and not schema)
        assert takes(grammar, call)
        assert takes(grammar, final) == (choice == AUTO and not schema)
        assert takes(grammar, "<|channel|>final<|message|>{}") == (choice == AUTO)
        assert not takes(grammar, "Hi")
        assert not takes(grammar, call.replace("Rome", "Bonn"))
        assert not takes(grammar, f"{call}<|call|><|start|>assistant{call}")
    bounded = reasoning_grammar(known, 2, is_thinking=False)
    assert takes(bounded, final)
    for num in (2, 3):
        thought = f"<|channel|>analysis<|message|>{'a' * num}<|end|><|start|>assistant"
        assert takes(bounded, thought + final) == (num == 2)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_a_grammar_takes_what_the_format_writes_and_nothing_like_it(
    calls: CallFormat, has_tokens: bool
) -> None:
    triggers = [calls.trigger] if has_tokens and calls.trigger[0] in "<[" else []
    special, words = ["<s>"], [*THINK]
    (words if calls.trigger[0] == "<" else special).extend(triggers)
    tokenizer = byte_tokenizer(special, words)
    end = tokenizer.token_to_id("<s>")
    source = tokenizer.to_str().encode()
    known = AnswerFormat(
        calls=calls,
        reasoning=THINK,
        ids={one: tokenizer.token_to_id(one) for one in [*THINK, *triggers]},
    )
    constraints = GrammarConstraints(source, tokenizer.get_vocab_size(), (end,))

    def takes(text: str, choice: str, name: str = "", **options: bool) -> bool:
        options = {"is_single": False, **options}
        grammar = tools_grammar(json_text("", TOOLS), known, choice, name, **options)
        params = GrammarParams(kind=GrammarKind.LARK, text=grammar)
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        return constraints.constraint(params).fits(ids) == len(ids)

    both = written(calls)
    one = calls.begin + calls.open + "weather" + calls.middle + FIRST + calls.close + calls.end
    for choice in (AUTO, REQUIRED):
        assert takes(both, choice)
        assert takes(one, choice, is_single=True)
        assert not takes(both, choice, is_single=True)
        assert takes(f"<think>a</think>\n\n{one}", choice)
        assert not takes(f"<think>a{one}", choice)
        assert takes(f"a</think>{one}", choice, is_thinking=True)
        assert not takes(one.replace("Rome", "Bonn"), choice)
        assert not takes(both[:-1], choice) or both[-1] in "]}"
        assert takes("Hello", choice) == (choice == AUTO)
    assert takes(one, REQUIRED, "weather")
    assert not takes(one, REQUIRED, "weather_more")
    assert not takes(both, REQUIRED, "weather")
    assert takes(f"Hi {one}", AUTO)
    assert not takes(f"Hi {one}", REQUIRED)
    assert takes('{"name": "Ann", "parameters": {}}', AUTO)


def test_schemas_are_closed_where_they_name_properties_and_a_text_of_json_has_bounded_white_space() -> (
    None
):
    tokenizer = byte_tokenizer(["<s>"])
    end, known = tokenizer.token_to_id("<s>"), AnswerFormat(calls=HERMES)
    source = tokenizer.to_str().encode()
    constraints = GrammarConstraints(source, tokenizer.get_vocab_size(), (end,))

    def takes(parameters: object, text: str, **options: Any) -> bool:
        tools = json_text("", [{"function": {"name": "a", "parameters": parameters}}])
        grammar = tools_grammar(tools, known, AUTO, "", is_single=True, **options)
        params = GrammarParams(kind=GrammarKind.LARK, text=grammar)
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        return constraints.constraint(params).fits(ids) == len(ids)

    def call(arguments: str) -> str:
        return f"{HERMES.open}a{HERMES.middle}{arguments}{HERMES.close}"

    number = {"type": "object", "properties": {"b": {"type": "integer"}}}
    either = {"anyOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {**number, "required": ["b"]}}}
    assert takes(None, call("{}")) and not takes(None, call('{"b": 1}'))
    assert takes(number, call('{"b": 1}')) and takes(number, call("{}"))
    assert not takes(number, call('{"b": 1, "c": 2}'))
    assert takes(either, call('{"b": 1}')) and not takes(either, call("{}"))
    form = json_text("", {**number, "additionalProperties": False})
    assert takes(None, '{ "b": 1}', schema=form) and takes(None, call("{}"), schema=form)
    assert not takes(None, '{  "b": 1}', schema=form)
    assert not takes(None, '{ "b": 1}', schema=form, allows_whitespace=False)
    assert not takes(None, "text", schema=form)
    # What a caller says of the schema's keywords says nothing of white space.
    lenient = json_text("", {**number, "not": {}, "x-guidance": {"lenient": True}})
    assert takes(None, '{ "b": 1}', schema=lenient)
    assert not takes(None, '{  "b": 1}', schema=lenient)
    assert not takes(None, '{ "b": 1}', schema=lenient, allows_whitespace=False)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_reasoning_ends_behind_so_many_tokens_and_nothing_else_is_changed(most: int) -> None:
    tokenizer = byte_tokenizer(["<s>"], [*THINK, HERMES.trigger])
    end = tokenizer.token_to_id("<s>")
    ids = {one: tokenizer.token_to_id(one) for one in [*THINK, HERMES.trigger]}
    known = AnswerFormat(calls=HERMES, reasoning=THINK, ids=ids, special_ids=(end,))
    source = tokenizer.to_str().encode()
    constraints = GrammarConstraints(source, tokenizer.get_vocab_size(), (end,))
    tools = json_text("", TOOLS)

    def grammars(is_thinking: bool) -> list[str]:
        options: dict[str, Any] = {"is_thinking": is_thinking, "max_reasoning": most}
        return [
            reasoning_grammar(known, most, is_thinking=is_thinking),
            tools_grammar(tools, known, AUTO, "", is_single=True, **options),
        ]

    def constraint(grammar: str) -> GrammarConstraint:
        return constraints.constraint(GrammarParams(kind=GrammarKind.LARK, text=grammar))

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def takes(grammar: str, text: str) -> bool:
        tokens = [*ids_of(text), end]
        return constraint(grammar).fits(tokens) == len(tokens)

    for opening in ("<think>", ""):
        for grammar in grammars(is_thinking=not opening):
            assert takes(grammar, f"{opening}{'a' * most}</think>Hello")
            assert not takes(grammar, f"{opening}{'a' * (most + 1)}</think>Hello")
            begun = constraint(grammar)
            begun.commit(ids_of(opening + "a" * most))
            assert begun.forced(1) == (ids["</think>"],)
    free, _ = grammars(is_thinking=False)
    assert takes(free, "a text without any") and takes(free, "")
    assert takes(free, f"a {HERMES.trigger} b </think>")
    assert not takes(free, "a text <think>and a thought</think>")
    # A call that is asked for comes: reasoning neither ends the answer nor begins a call.
    grammar = tools_grammar(
        tools, known, REQUIRED, "", is_single=True, is_thinking=True, max_reasoning=4
    )
    assert constraint(grammar).fits([*ids_of("a"), end]) <= min(1, most + 1)
    assert constraint(grammar).fits([ids[HERMES.trigger]]) == 0
