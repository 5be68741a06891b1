"""From the texts of requests to token ids, long texts in their turn.

With an encoder a request's text is the source; what its answer begins with is the model's decoder prefix and the
request's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.limits import ServedModel
from outrider.runtime.core.checks.validate import check_prompt_size
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import ChatParams
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.tokenization import BYTES_PER_TOKEN, TokenizationQueue
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TextCodec, tokenize_bad_words
from outrider.v1 import inference_pb2 as wire

# Of an answer to Tokenize: what gRPC clients take where nobody says otherwise.
MAX_ANSWER_BYTES = 4 << 20

T = TypeVar("T")


class RequestEncoder:
    """Tokenises what a request says; used on the event loop alone.

    Args:
        codec: of the model.
        texts: where long texts wait.
        chats: of the bundle's templates; None where it has none.
        model: that prompts are for.
        max_bytes: of a rendered conversation, in UTF-8.
        tenant: whose texts these are.
    """

    def __init__(
        self,
        codec: TextCodec,
        texts: TokenizationQueue,
        chats: ChatEncoder | None,
        model: ServedModel,
        max_bytes: int,
        tenant: str = "",
    ) -> None:
        self._codec = codec
        self._texts = texts
        self._chats = chats
        self._model = model
        self._max_bytes = max_bytes
        self._tenant = tenant

    def of(self, tenant: str) -> RequestEncoder:
        """Return the encoder of a tenant's texts."""
        return RequestEncoder(
            self._codec, self._texts, self._chats, self._model, self._max_bytes, tenant
        )

    def decoder_prefix(self, fields: GenerateFields) -> tuple[int, ...] | None:
        """Return what every answer in the request's language begins with; None for a decoder-only model.

        Raises:
            RequestError: there is no such language, or none is named and the model has no default.
        """
        codec = self._codec
        if not isinstance(codec, EncoderDecoderCodec):
            return None
        return codec.decoder_prefix(fields.target_language)

    async def prompt(self, fields: GenerateFields) -> tuple[int, ...]:
        """Return the prompt's tokens: with an encoder, those of the source.

        Raises:
            RequestError: likewise, of the source's language; or a conversation cannot be rendered.
            Overloaded: too many texts wait, here and below.
        """
        if fields.tokens is not None:
            return fields.tokens
        if (chat := fields.chat) is not None:
            return await self._run(chat.size, lambda: self._encode_prompt(chat), is_prompt=True)
        codec, text = self._codec, fields.text or ""
        size = len(text.encode())
        if isinstance(codec, EncoderDecoderCodec):
            encode, language = codec.encode_source, fields.source_language
            return await self._run(size, lambda: encode(text, language), is_prompt=True)
        return await self._run(size, lambda: codec.encode(text), is_prompt=True)

    async def echo(self, fields: GenerateFields, prompt_tokens: tuple[int, ...]) -> str:
        """Return the prompt's text: as it was given, else that of its tokens.

        Raises:
            Overloaded: too many texts wait.
        """
        if fields.text is not None:
            return fields.text
        codec, skips_special = self._codec, fields.skip_special_tokens
        return await self._run(
            BYTES_PER_TOKEN * len(prompt_tokens),
            lambda: codec.decode(prompt_tokens, skip_special_tokens=skips_special),
        )

    async def answer_prefix(self, fields: GenerateFields) -> tuple[int, ...]:
        """Return the tokens that the answer begins with behind the decoder prefix."""
        codec, text = self._codec, fields.answer_prefix
        if fields.answer_prefix_tokens is not None:
            return fields.answer_prefix_tokens
        if not isinstance(codec, EncoderDecoderCodec) or not text:
            return ()
        return await self._run(len(text.encode()), lambda: codec.encode_prefix(text))

    async def bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of bad words."""
        size = len("".join(words).encode())
        return await self._run(size, lambda: tokenize_bad_words(self._codec, words))

    async def with_reference(self, fields: GenerateFields) -> GenerateFields:
        """Return the fields with their reference text tokenised."""
        text = fields.speculation.reference
        if not text:
            return fields
        tokens = await self._run(len(text.encode()), lambda: self._codec.encode(text, False))
        return replace(fields, speculation=replace(fields.speculation, reference_tokens=tokens))

    async def tokenize(self, request: wire.TokenizeRequest, max_context: int) -> bytes:
        """Return the answer to Tokenize.

        Raises:
            RequestError: clients would not take an answer of its length; or no such language, as for ``prompt``.
        """
        size = len(request.text.encode())
        return await self._run(size, lambda: self._spelled(request, max_context))

    async def tokenize_chat(self, chat: ChatParams, max_context: int) -> bytes:
        """Return the answer to Tokenize of a conversation.

        Raises:
            RequestError: clients would not take an answer of its length; or it cannot be rendered.
        """
        return await self._run(
            chat.size,
            lambda: _answer("chat", self._codec, self._encode_chat(chat), max_context),
        )

    def _run(self, size: int, work: Callable[[], T], *, is_prompt: bool = False) -> Awaitable[T]:
        """Return what work on one of the tenant's texts returns, in its turn."""
        return self._texts.run_sized(size, work, tenant=self._tenant, is_prompt=is_prompt)

    def _spelled(self, request: wire.TokenizeRequest, max_context: int) -> bytes:
        """Return the answer to Tokenize; callable from any thread."""
        codec, text = self._codec, request.text
        has_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        if not isinstance(codec, EncoderDecoderCodec):
            ids = codec.encode(text, has_special)
        elif request.target:
            ids = codec.encode_prefix(text)
        elif has_special:
            ids, codec = codec.encode_source(text, request.source_language), codec.sources
        else:
            ids, codec = codec.sources.encode(text, False), codec.sources
        return _answer("text", codec, ids, max_context)

    def _encode_prompt(self, chat: ChatParams) -> tuple[int, ...]:
        """Return the prompt of a conversation, which no slot holds where its text is too long for that."""
        model, token_bytes = self._model, self._model.max_token_bytes
        if token_bytes is None or model.max_context * token_bytes >= self._max_bytes:
            return self._encode_chat(chat)
        try:
            return self._encode_chat(chat, model.max_context * token_bytes)
        except RequestError as error:
            if error.field == "chat":  # the rendered text as a whole
                check_prompt_size(model.max_context + 1, model)
            raise

    def _encode_chat(self, chat: ChatParams, max_bytes: int | None = None) -> tuple[int, ...]:
        assert self._chats is not None  # requests were refused otherwise
        return self._chats.encode(chat, self._max_bytes if max_bytes is None else max_bytes)


def _answer(field: str, codec: TextCodec, ids: Sequence[int], max_context: int) -> bytes:
    """Return the answer to Tokenize of these ids, which came in ``field``."""
    response = wire.TokenizeResponse(
        ids=ids, tokens=[codec.spell(token) for token in ids], max_context=max_context
    )
    if response.ByteSize() > MAX_ANSWER_BYTES:
        rule = f"must have an answer of at most {MAX_ANSWER_BYTES} bytes; ask for it in pieces"
        raise RequestError(field, rule)
    return response.SerializeToString()
