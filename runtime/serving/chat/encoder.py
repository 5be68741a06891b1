"""From a conversation to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache, cached_property

from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import ChatParams
from outrider.runtime.serving.chat.control_token_escaping import ControlTokenEscaping
from outrider.runtime.serving.chat.conversation import (
    ARGUMENTS_FIELD,
    cut_at_tag,
    marked,
    read_conversation,
    reasoning_named,
    tag_final,
)
from outrider.runtime.serving.chat.files import ChatFiles
from outrider.runtime.serving.chat.formats import recognise
from outrider.runtime.serving.chat.template import MESSAGES_FIELD, ChatTemplate
from outrider.runtime.serving.tokenizer import TokenizersCodec

DEFAULT_TEMPLATE = "default"
TOOLS_TEMPLATE = "tool_use"
# Behind it a piece of a text is tokenised as it is within the text: some tokenizers put a space before a text.
_NEW_LINE = "\n"


class ChatEncoder:
    """Renders conversations and tokenises them; callable from any thread.

    Args:
        files: of the bundle.
        codec: of the bundle's decoder-only model.
        now: the time of day, for templates that write the date.

    Attributes:
        files: as given.
        answers: format of what the model answers.

    Raises:
        BundleError: a template cannot be compiled.
    """

    def __init__(
        self,
        files: ChatFiles,
        codec: TokenizersCodec,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.files = files
        self.answers = recognise(files.templates.values(), codec)
        self._codec = codec
        # A text may spell them ten thousands of times; there are some dozens of them.
        self._plain_ids = cache(self._find_plain_ids)
        self._templates = {
            name: _Rendering(ChatTemplate(name, source, now), files, codec)
            for name, source in files.templates.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates."""
        return tuple(self._templates)

    def encode(self, chat: ChatParams, max_bytes: int) -> tuple[int, ...]:
        """Return the ids of a conversation's prompt, its template's special tokens included and no further ones.

        Args:
            chat: as ``runtime.core.checks.rules.check_chat`` leaves it.
            max_bytes: of the rendered text, in UTF-8.

        Raises:
            RequestError: a part of it is not what it should be, or the template refuses it.
        """
        rendering = self._rendering(chat)
        pieces = rendering.marks.split(rendering.render(chat, max_bytes))
        ids = [*self._codec.encode(pieces[0], add_special_tokens=False)]
        for number, piece in enumerate(pieces[1:], start=1):
            if piece:
                # Texts and tokens that are text stand in turns.
                is_token = number % 2 == 1
                ids += self._plain_ids(piece, rendering) if is_token else self._ids(piece)
        return tuple(ids)

    def render(self, chat: ChatParams, max_bytes: int) -> str:
        """Return the text that ``encode`` tokenises.

        Raises:
            RequestError: as ``encode``.
        """
        rendering = self._rendering(chat)
        return "".join(rendering.marks.split(rendering.render(chat, max_bytes)))

    def _rendering(self, chat: ChatParams) -> _Rendering:
        """Return the template that Transformers would take.

        Raises:
            RequestError: the bundle has several and none of them is the default.
        """
        wanted = chat.template or (TOOLS_TEMPLATE if chat.tools else "")
        found = self._templates.get(wanted) or self._templates.get(DEFAULT_TEMPLATE)
        if found is None:
            raise RequestError("chat.template", f"required: one of {', '.join(self._templates)}")
        return found

    def _ids(self, text: str) -> tuple[int, ...]:
        return self._behind_line(text, lambda one: self._codec.encode(one, False))

    def _find_plain_ids(self, token: str, rendering: _Rendering) -> tuple[int, ...]:
        """Return ids that spell a control token, none of which is a control token's."""
        # Some tokenizers have it in their vocabulary as a word like others, but seldom its letters.
        for pieces in ((token,), tuple(token)):
            found = [self._behind_line(one, self._codec.encode_plain) for one in pieces]
            ids = tuple(index for part in found for index in part)
            if rendering.control_ids.isdisjoint(ids):
                return ids
        raise RequestError(MESSAGES_FIELD, "has a control token that cannot be spelled as text")

    def _behind_line(self, text: str, encode: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the ids of a text that stands behind another one."""
        line = self._line_ids
        found = encode(_NEW_LINE + text)
        return found[len(line) :] if found[: len(line)] == line else encode(text)

    @cached_property
    def _line_ids(self) -> tuple[int, ...]:
        return self._codec.encode(_NEW_LINE, add_special_tokens=False)


class _Rendering:
    """A template with the tokens that have a meaning in it.

    Attributes:
        marks: splits what ``render`` returns.
        control_ids: of the tokens that have a meaning.
    """

    def __init__(self, template: ChatTemplate, files: ChatFiles, codec: TokenizersCodec) -> None:
        self._template = template
        self._special_tokens = files.special_tokens
        # A template's words that are tokens of their own steer the model too; white space is no such word.
        literals = "\0".join(template.literals)
        found = [one for one in codec.added_tokens if not one.isspace() and one in literals]
        tokens = tuple(dict.fromkeys((*files.control_tokens, *found)))
        ids = codec.added_tokens
        self.control_ids = frozenset(ids[one] for one in tokens if one in ids)
        self.marks = ControlTokenEscaping(tokens)

    def render(self, chat: ChatParams, max_bytes: int) -> str:
        """Return the text of a conversation, with its marks."""
        conversation = reasoning_named(marked(read_conversation(chat), self.marks))
        final = tag_final(conversation, self._template.source) if chat.continues_final else None
        rendered = self._template.render(
            conversation.variables(self._special_tokens),
            max_bytes,
            suspect=ARGUMENTS_FIELD if conversation.arguments else MESSAGES_FIELD,
        )
        return rendered if final is None else cut_at_tag(rendered, final)
