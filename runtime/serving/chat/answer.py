"""Reads the parts of a chat's answer from its text as it comes: reasoning, content, and calls of tools.

What looks like a call and is none stays content: a call has the trigger of its format, the name of a tool that the
request has, and arguments that begin as an object. Where the answer was constrained its calls have one spelling;
others may have white space between.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from outrider.runtime.core.events import Finished
from outrider.runtime.serving.chat.formats import AnswerFormat, CallFormat
from outrider.runtime.serving.chat.tools import tools_of
from outrider.runtime.serving.response_stream import Batch, CallPiece
from outrider.v1 import inference_pb2 as wire

MOST_HEAD = 256
"""Characters from a trigger to the arguments; a text that has none behind so many is no call."""
_ID_LENGTH = 9
"""Of a call: what Mistral's templates want, and others do not mind."""
_PUNCTUATION = re.compile(r"(\s+|[{}\[\],:])")


@dataclass(slots=True)
class _Parts:
    """Text, reasoning and calls of one piece."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


def answer_reader(
    request: wire.GenerateRequest, known: AnswerFormat, prompt: tuple[int, ...]
) -> AnswerReader | None:
    """Return what reads the answer of a request; None where all of it is text.

    Args:
        request: whose answer has no calls where it has a form of its own.
        known: format of the model's answers.
        prompt: tokens that it is an answer to.
    """
    chat, has_form = request.chat, bool(request.regex or request.grammar)
    is_called = chat.tool_choice and chat.tools_json and known.calls is not None and not has_form
    if not chat.parse_answer or not (is_called or known.reasoning):
        return None
    tools = tools_of(chat.tools_json) if is_called else ()
    names = frozenset(one.name for one in tools)
    return AnswerReader(known, names, is_thinking=known.opens_reasoning(prompt))


class AnswerReader:
    """Splits the batches of one request's completions.

    Args:
        known: format of the model's answers.
        names: of the tools that may be called.
        is_thinking: whether the answers begin within reasoning.
    """

    def __init__(self, known: AnswerFormat, names: frozenset[str], *, is_thinking: bool) -> None:
        self._known = known
        self._names = names
        self._is_thinking = is_thinking
        # By index of the completion.
        self._texts: dict[int, TextReader] = {}

    def read(self, batch: Batch) -> Batch:
        """Return a batch with its parts apart."""
        end = batch.end
        if isinstance(end, Finished) and end.beams:
            return batch
        reader = self._texts.get(batch.index)
        if reader is None:
            reader = TextReader(self._known, self._names, is_thinking=self._is_thinking)
            self._texts[batch.index] = reader
        num_reasoning = reader.count(tuple(one.token for one in batch.tokens))
        text = batch.text
        if isinstance(end, Finished):
            text, end = text + end.text, replace(end, text="")
        parts = reader.feed(text, is_last=isinstance(end, Finished))
        return replace(
            batch,
            text=parts.text,
            reasoning=parts.reasoning,
            calls=parts.calls,
            num_reasoning=num_reasoning,
            end=end,
        )


class TextReader:
    """One completion: a state, which is the function that reads on, and the text that is not read yet."""

    def __init__(self, known: AnswerFormat, names: frozenset[str], *, is_thinking: bool) -> None:
        self._names = names
        calls = known.calls if names else None
        self._marked = None if calls is None or calls.is_whole else _Heads(calls, known.ids)
        whole = calls if calls is None or calls.is_whole else calls.bare
        self._whole = None if whole is None else _Heads(whole)
        self._heads: _Heads | None = None  # of the last call
        opened, self._closed = known.reasoning or ("", "")
        self.count = _ReasoningCount(known, is_thinking=is_thinking).count
        # What may stand in front of an answer, and what reads on behind it.
        self._marks = {opened: self._thought} if opened else {}
        if known.content:
            self._marks |= {known.turn: self._begin, known.content: self._final}
            self._marks[known.aside] = self._thought
        # Tokens of marks, where answers are messages of channels.
        self._channels = tuple(known.ids) if known.content else ()
        self._read: Callable[[bool], bool] = self._thought if is_thinking else self._begin
        self._held = ""
        self._trims = True
        self._has_text = False
        self._num_calls = 0
        self._object = _ObjectEnd()
        self._parts = _Parts()

    def feed(self, text: str, *, is_last: bool) -> _Parts:
        """Return what a piece of text says; what is not clear yet comes with a later one."""
        self._held += text
        self._parts = _Parts()
        while self._read(is_last):
            pass
        return self._parts

    def _begin(self, is_last: bool) -> bool:
        """Read what stands in front of an answer: reasoning, marks of its content, or nothing."""
        found = self._held.lstrip()
        for mark, read in self._marks.items():
            if found.startswith(mark):
                self._held, self._read = found[len(mark) :], read
                return True
        if any(mark.startswith(found) for mark in self._marks):
            if not is_last:
                return False
            # Without a whole token of the marks it is a text that begins like one.
            is_cut = any(one in found for one in self._channels)
            self._held = "" if is_cut else self._held
        self._read, self._trims = self._text, False
        return True

    def _thought(self, is_last: bool) -> bool:
        """Read reasoning, without white space around it."""
        if not self._trimmed():
            return False
        place = self._held.find(self._closed)
        if place < 0:
            self._parts.reasoning += self._taken(_certain(self._held, self._closed, is_last))
            return False
        self._parts.reasoning += self._taken(len(self._held[:place].rstrip()))
        self._held = self._held.lstrip()[len(self._closed) :]
        self._read, self._trims = self._begin if self._channels else self._text, True
        return True

    def _final(self, is_last: bool) -> bool:
        """Read content that no call is in."""
        self._say(len(self._held))
        return False

    def _text(self, is_last: bool) -> bool:
        """Read content up to the next trigger."""
        if not self._trimmed():
            return False
        if self._whole is not None and not self._has_text:
            head = self._whole.first.match(self._held)
            if head is not None and head["name"] in self._names:
                self._call(head, self._whole)
                return True
            if head is None and not is_last and self._whole.may_begin(self._held):
                return False
            if (
                self._channels
                and self._whole.format.trigger.strip() in self._held
                and self._whole.is_cut(self._held, self._names)
            ):
                self._held = ""
                return False
        if self._marked is None:
            self._say(len(self._held))
            return False
        trigger = self._marked.format.trigger
        place = self._held.find(trigger)
        if place < 0:
            cut = self._held.rfind(self._marked.token) if is_last else -1
            if cut >= 0 and self._marked.is_cut(self._held[cut:], self._names):
                self._held = self._held[:cut].rstrip()
            self._say(_certain(self._held, trigger, is_last))
            return False
        head = self._marked.first.match(self._held, place)
        if head is not None and head["name"] in self._names:
            self._say(len(self._held[:place].rstrip()))
            self._call(head, self._marked)
        elif is_last and head is None and self._marked.is_cut(self._held[place:], self._names):
            self._say(len(self._held[:place].rstrip()))
            self._held = ""
        elif head is not None or is_last or len(self._held) - place > MOST_HEAD:
            self._say(place + len(trigger))
        else:
            self._say(len(self._held[:place].rstrip()))
            return False
        return True

    def _arguments(self, is_last: bool) -> bool:
        """Read the arguments of a call."""
        length = self._object.find(self._held)
        is_over = length is not None
        if piece := self._taken(len(self._held) if length is None else length):
            self._add(CallPiece(index=self._num_calls - 1, arguments=piece))
        if is_over:
            self._read = self._behind
        return is_over

    def _behind(self, is_last: bool) -> bool:
        """Read what stands behind a call: the next one, the end of all, or text that does not belong there."""
        heads = self._heads
        assert heads is not None
        head = heads.next.match(self._held)
        if head is not None and head["name"] in self._names:
            self._call(head, heads)
            return True
        if not is_last and len(self._held) <= MOST_HEAD:
            return False
        if is_last and heads.is_cut_behind(self._held, self._names):
            self._held = ""
        elif (last := heads.last.match(self._held)) is not None:
            self._held = self._held[last.end() :]
        self._read, self._trims = self._text, True
        return True

    def _call(self, head: re.Match[str], heads: _Heads) -> None:
        """Begin a call whose arguments are next."""
        self._heads = heads
        self._held = head.string[head.end() :]
        name, index = head["name"], self._num_calls
        self._add(CallPiece(index=index, id=uuid.uuid4().hex[:_ID_LENGTH], name=name))
        self._num_calls += 1
        self._object = _ObjectEnd()
        self._read = self._arguments

    def _add(self, piece: CallPiece) -> None:
        self._parts.calls += (piece,)

    def _say(self, length: int) -> None:
        text = self._taken(length)
        self._has_text = self._has_text or bool(text)
        self._parts.text += text

    def _taken(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _trimmed(self) -> bool:
        """Drop white space where a part begins; return whether there is a text to read."""
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        return bool(self._held)


class _ReasoningCount:
    """Counts the tokens of a completion that are reasoning."""

    def __init__(self, known: AnswerFormat, *, is_thinking: bool) -> None:
        opened, closed = known.reasoning or (None, "")
        self._opening = known.opening or (() if opened is None else (known.ids[opened],))
        self._closing = known.ids.get(closed)
        # With channels another reasoning may follow.
        self._again = (*known.turn_ids, *self._opening) if known.content else ()
        self._is_thinking = is_thinking
        # What would begin it, as far as it has not come yet; nothing where none can begin.
        self._wanted = () if is_thinking else self._opening

    def count(self, tokens: tuple[int, ...]) -> int:
        """Return how many of the next tokens are reasoning, its marks included."""
        if not self._is_thinking and not self._wanted:
            return 0
        return sum(map(self._count, tokens))

    def _count(self, token: int) -> int:
        if self._is_thinking:
            if token == self._closing:
                self._is_thinking, self._wanted = False, self._again
            return 1
        if self._wanted[:1] != (token,):
            self._wanted = ()
            return 0
        self._wanted = self._wanted[1:]
        self._is_thinking = not self._wanted
        return len(self._opening) if self._is_thinking else 0


class _Heads:
    """Patterns of the text in front of a format's arguments, and behind the last ones."""

    def __init__(self, calls: CallFormat, tokens: Collection[str] = ()) -> None:
        self.format = calls
        # That begins the trigger: an answer that ends behind it was cut within a call.
        trigger = calls.trigger
        self.token = next((one for one in tokens if trigger.startswith(one)), trigger)
        self._middles = (calls.middle, *calls.other_middles)
        middle = "|".join(map(_loose, self._middles))
        head = rf"(?P<name>[\w.-]{{1,64}})(?:{middle})(?=\{{)"
        self.first = re.compile(_loose(calls.begin + calls.open) + head)
        self.next = re.compile(_loose(calls.close + calls.between + calls.open) + head)
        self.last = re.compile(_loose(calls.close + calls.end))

    def is_cut(self, text: str, names: frozenset[str]) -> bool:
        """Return whether a text ends within the head of a call."""
        return self._is_cut(text, self.format.begin + self.format.open, names)

    def is_cut_behind(self, text: str, names: frozenset[str]) -> bool:
        """Return whether a text behind arguments ends within the end of the calls, or within the next one's head."""
        calls = self.format
        is_end = _dense(calls.close + calls.end).startswith(_dense(text))
        head = calls.close + calls.between + calls.open
        return is_end or self._is_cut(text, head, names)

    def _is_cut(self, text: str, opened: str, names: frozenset[str]) -> bool:
        return any(_is_cut(text, opened, names, middle) for middle in self._middles)

    def may_begin(self, text: str) -> bool:
        """Return whether a text may go on to be a call."""
        trigger, found = _dense(self.format.trigger), _dense(text)
        return len(text) <= MOST_HEAD and found[: len(trigger)] == trigger[: len(found)]


class _ObjectEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return the length up to the object's end in the next piece; None where it goes on."""
        for place, letter in enumerate(text):
            if self._is_text:
                self._is_text = self._is_escaped or letter != '"'
                self._is_escaped = not self._is_escaped and letter == "\\"
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def _certain(text: str, mark: str, is_last: bool) -> int:
    """Return the length of what can be shown: no mark may begin in it, and no white space ends it."""
    if is_last:
        return len(text)
    most = min(len(text), len(mark) - 1)
    part = next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
    return len(text[: len(text) - part].rstrip())


def _is_cut(text: str, opened: str, names: frozenset[str], middle: str) -> bool:
    """Return whether a text is the beginning of what stands in front of arguments."""
    found = _dense(text)
    return len(text) <= MOST_HEAD and any(
        _dense(opened + name + middle).startswith(found) for name in names
    )


def _loose(text: str) -> str:
    """Return a pattern of a text of JSON and marks with any white space at its punctuation."""
    pieces = (one for one in _PUNCTUATION.split(text) if one)
    found = "".join(
        r"\s*"
        if one.isspace()
        else rf"\s*{re.escape(one)}\s*"
        if one in "{}[],:"
        else re.escape(one)
        for one in pieces
    )
    # Neighbours would be tried in every way that they can share a run of spaces.
    return re.sub(r"(\\s\*)+", r"\\s*", found)


def _dense(text: str) -> str:
    return "".join(text.split())
