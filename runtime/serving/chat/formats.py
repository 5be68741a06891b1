"""How models write calls of tools, and where their reasoning stands: what is recognised in a bundle's chat templates.

A call's text is ``open``, the tool's name, ``middle``, the arguments as JSON, ``close``. The first has ``begin`` in
front, the others ``between``, and the last ``end`` behind it. This module knows no request.
"""

# Control tokens of a published format have letters that look like others.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider.runtime.serving.tokenizer import TokenizersCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way of writing calls.

    Attributes:
        has: texts that a template of the format has, all of them.
        lacks: texts that it has none of.
        trigger: what ``begin`` and ``open`` start with: a text with it is a call.
        other_middles: that models write too, in calls that no grammar spells.
        is_whole: whether the calls are the whole answer, and the trigger in its midst is text.
        bare: how models write calls that know this format and leave its marks out, or set them elsewhere.
        has_text_arguments: whether the template writes the arguments of earlier calls as they are, and not as JSON.
    """

    name: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    trigger: str
    begin: str = ""
    open: str
    middle: str
    close: str = ""
    between: str = ""
    end: str = ""
    other_middles: tuple[str, ...] = ()
    is_whole: bool = False
    bare: CallFormat | None = None
    has_text_arguments: bool = False


_OPEN, _ARGUMENTS = '{"name": "', '", "arguments": '
_BARE = CallFormat(
    name="bare",
    has=(),
    trigger=_OPEN,
    open=_OPEN,
    middle=_ARGUMENTS,
    close="}",
    between="\n",
    is_whole=True,
)
_LISTED = replace(_BARE, between=", ", end="]", is_whole=False)
_DEEPSEEK = CallFormat(
    name="deepseek_v3.1",
    has=("<｜tool▁sep｜>",),
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    has_text_arguments=True,
)
# Of gpt-oss: the tool's name is part of the role, which the prompt's end begins.
_ROLE = CallFormat(
    name="harmony_role",
    has=(),
    trigger=" to=functions.",
    open=" to=functions.",
    middle="<|channel|>commentary <|constrain|>json<|message|>",
    other_middles=("<|channel|>commentary json<|message|>", "<|channel|>commentary<|message|>"),
    between="<|call|><|start|>assistant",
    is_whole=True,
)


def _listed(
    name: str,
    trigger: str,
    *,
    has: str,
    lacks: tuple[str, ...] = (),
    behind: str = "[",
    end: str = "]",
) -> CallFormat:
    """Return a format of one list of objects, ``behind`` a trigger."""
    begin = trigger + behind
    return replace(
        _LISTED, name=name, has=(has,), lacks=lacks, trigger=trigger, begin=begin, end=end
    )


# The first that fits is a template's.
CALL_FORMATS = (
    replace(
        _DEEPSEEK,
        name="deepseek_v3",
        has=("<｜tool▁sep｜>", "```json"),
        open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        close="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
    _DEEPSEEK,
    CallFormat(
        name="mistral_v13",
        has=("[TOOL_CALLS]", "[ARGS]"),
        lacks=("[CALL_ID]",),
        trigger="[TOOL_CALLS]",
        open="[TOOL_CALLS]",
        middle="[ARGS]",
    ),
    _listed("mistral_tekken", "[TOOL_CALLS]", has="[TOOL_CALLS][", lacks=("[ARGS]",)),
    _listed("mistral", "[TOOL_CALLS]", has="[TOOL_CALLS]", lacks=("[ARGS]",), behind=" ["),
    # gpt-oss: a call ends the turn, and others may follow where its end does not end the answer.
    CallFormat(
        name="harmony",
        has=("<|channel|>commentary", "<|call|>"),
        trigger="<|channel|>commentary to=functions.",
        open="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        other_middles=(" json<|message|>", "<|message|>"),
        between="<|call|><|start|>assistant",
        bare=_ROLE,
    ),
    _listed("granite", "<|tool_call|>", has="<|tool_call|>"),
    _listed("smollm2", "<tool_call>", has="<tool_call>[", end="]</tool_call>"),
    CallFormat(
        name="hermes",
        has=("<tool_call>",),
        # Qwen3-Coder, and GLM.
        lacks=("<function=", "<arg_key>"),
        trigger="<tool_call>",
        open='<tool_call>\n{"name": "',
        middle=_ARGUMENTS,
        close="}\n</tool_call>",
        between="\n",
        bare=_BARE,
    ),
    replace(
        _BARE,
        name="llama3",
        has=(_OPEN, '"parameters": '),
        lacks=("<tool_call>", "<function="),
        middle='", "parameters": ',
        between="; ",
    ),
)
# Where reasoning begins and ends.
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Where answers are messages of channels: reasoning, what begins another message, and the answer's own text.
_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
_TURN, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_ASIDE = "<|channel|>commentary<|message|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the parts of a model's answers look like.

    Attributes:
        calls: None where no format is known.
        reasoning: the tokens around it; None for none. With channels the first is of several tokens.
        opening: ids of what begins reasoning, where these are several.
        turn: with channels, what stands between two messages; empty without.
        turn_ids: of its tokens.
        aside: with channels, what stands in front of a text that is neither content nor a call; told as reasoning.
        content: with channels, what stands in front of the content.
        ids: of the tokens that stand in these formats and in no plain text, by their texts.
        special_ids: of the tokens that no text spells: ends, and marks of chats.
        has_special: whether some are left out of texts that leave special tokens out.
        reads_tools: whether a template says anything about tools.
    """

    calls: CallFormat | None = None
    reasoning: tuple[str, str] | None = None
    opening: tuple[int, ...] = ()
    turn: str = ""
    turn_ids: tuple[int, ...] = ()
    aside: str = ""
    content: str = ""
    ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    special_ids: tuple[int, ...] = field(default=(), hash=False)
    has_special: bool = False
    reads_tools: bool = False

    def opens_reasoning(self, prompt: tuple[int, ...]) -> bool:
        """Return whether an answer behind a prompt begins within reasoning: the template may end with its begin."""
        if self.reasoning is None or self.opening:
            return False
        opened, closed = (self.ids[one] for one in self.reasoning)
        marks = [token for token in prompt[-_TAIL:] if token in (opened, closed)]
        return bool(marks) and marks[-1] == opened


# Tokens at the end of a prompt, among which are those that begin reasoning: white space may stand behind them.
_TAIL = 4
NO_FORMAT = AnswerFormat()


def recognise(templates: Iterable[str], codec: TokenizersCodec) -> AnswerFormat:
    """Return the format of the answers to these templates' prompts.

    Args:
        templates: their sources.
        codec: has the tokens.
    """
    text = "\0".join(templates)
    calls = next((one for one in CALL_FORMATS if _fits(one, text)), None)
    added = codec.added_tokens
    pairs = (pair for pair in _REASONING if all(one in text and one in added for one in pair))
    reasoning = next(pairs, None)
    has_channels = all(one in text and one in added for one in _CHANNELS)
    texts = [] if calls is None else [calls.begin, calls.open, calls.middle, calls.close, calls.end]
    if has_channels:
        reasoning = _ANALYSIS
        texts += [_TURN, _FINAL]
    if calls is not None:
        texts.append(calls.between)
    whole = "\0".join([*texts, *(reasoning or ())])
    ids = {one: index for one, index in added.items() if one in whole and codec.is_mark(one)}
    return AnswerFormat(
        calls=calls,
        reasoning=reasoning,
        opening=codec.encode(_ANALYSIS[0], False) if has_channels else (),
        turn=_TURN if has_channels else "",
        turn_ids=codec.encode(_TURN, False) if has_channels else (),
        aside=_ASIDE if has_channels else "",
        content=_FINAL if has_channels else "",
        ids=ids | {one: added[one] for one in reasoning or () if one in added},
        special_ids=tuple(sorted(i for one, i in added.items() if codec.is_special(one))),
        has_special=any(codec.is_special(one) for one in ids),
        reads_tools="tools" in text,
    )


def _fits(known: CallFormat, text: str) -> bool:
    return all(one in text for one in known.has) and not any(one in text for one in known.lacks)
