"""From the texts of requests to token ids, long texts in their turn.

With an encoder a request's text is the source; what its answer begins with is the model's decoder prefix and the
request's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from outrider.runtime.core.checks.limits import ServedModel
from outrider.runtime.core.checks.rules import check_prompt_size
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import ChatParams
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.requests.spec import EncodedTexts, chat_of
from outrider.runtime.serving.tokenization import BYTES_PER_TOKEN, INLINE_TEXT, TokenizationQueue
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
        short_chats: where short conversations wait: templates take a thread, and not the turn of a long text.
        chats: of the bundle's templates; None where it has none.
        model: that prompts are for.
        max_bytes: of a rendered conversation, in UTF-8.
        tenant: whose texts these are.
    """

    def __init__(
        self,
        codec: TextCodec,
        texts: TokenizationQueue,
        short_chats: TokenizationQueue,
        chats: ChatEncoder | None,
        model: ServedModel,
        max_bytes: int,
        tenant: str = "",
    ) -> None:
        self._codec = codec
        self._texts = texts
        self._short_chats = short_chats
        self._chats = chats
        self._model = model
        self._max_bytes = max_bytes
        self._tenant = tenant

    def of(self, tenant: str) -> RequestEncoder:
        """Return the encoder of a tenant's texts."""
        return RequestEncoder(
            self._codec,
            self._texts,
            self._short_chats,
            self._chats,
            self._model,
            self._max_bytes,
            tenant,
        )

    async def encode(self, request: wire.GenerateRequest) -> EncodedTexts:
        """Return the token ids of a request's texts.

        Raises:
            RequestError: a language is none of the model's, or is not named and the model has no default; or a
                conversation cannot be rendered.
            Overloaded: too many texts wait, here and below.
        """
        codec, words = self._codec, tuple(request.sampling.bad_words)
        prefix = None
        if isinstance(codec, EncoderDecoderCodec):
            prefix = codec.decoder_prefix(request.target_language)
        reference = request.speculation.reference
        return EncodedTexts(
            decoder_prefix=prefix,
            reference=await self._text(reference, lambda: codec.encode(reference, False)),
            prompt=await self._prompt(request),
            answer_prefix=await self._answer_prefix(request),
            bad_words=(
                await self._text("".join(words), lambda: tokenize_bad_words(codec, words))
                if words
                else None
            ),
        )

    async def decode(self, tokens: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        """Return the text of a prompt's tokens.

        Raises:
            Overloaded: too many texts wait.
        """
        codec = self._codec
        return await self._run(
            BYTES_PER_TOKEN * len(tokens),
            lambda: codec.decode(tokens, skip_special_tokens=skip_special_tokens),
        )

    async def _prompt(self, request: wire.GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's tokens: with an encoder, those of the source."""
        codec, text, language = self._codec, request.text, request.source_language
        if request.HasField("tokens"):
            return tuple(request.tokens.ids)
        if request.HasField("chat"):
            chat = chat_of(request.chat)
            return await self._run_chat(chat, lambda: self._encode_prompt(chat), is_prompt=True)
        has_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        return await self._run(
            len(text.encode()),
            lambda: _source_ids(codec, text, language, has_special=has_special),
            is_prompt=True,
        )

    async def _answer_prefix(self, request: wire.GenerateRequest) -> tuple[int, ...]:
        """Return the tokens that the answer begins with behind the decoder prefix."""
        codec, text = self._codec, request.answer_prefix
        if request.HasField("answer_prefix_tokens"):
            return tuple(request.answer_prefix_tokens.ids)
        if not isinstance(codec, EncoderDecoderCodec):
            return ()
        return await self._text(text, lambda: codec.encode_prefix(text))

    async def _text(self, text: str, work: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        """Return what work on a text returns, in its turn; nothing of an empty one."""
        return await self._run(len(text.encode()), work) if text else ()

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
        codec = self._codec
        return await self._run_chat(
            chat, lambda: _answer("chat", codec, self._encode_chat(chat), max_context)
        )

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """Return what work on so many bytes of the tenant's returns; beside the event loop where these are many.

        Raises:
            Overloaded: too many texts wait.
        """
        return await self._run(size, work)

    def _run(self, size: int, work: Callable[[], T], *, is_prompt: bool = False) -> Awaitable[T]:
        """Return what work on one of the tenant's texts returns, in its turn."""
        return self._texts.run_sized(size, work, tenant=self._tenant, is_prompt=is_prompt)

    def _run_chat(
        self, chat: ChatParams, work: Callable[[], T], *, is_prompt: bool = False
    ) -> Awaitable[T]:
        """Return what work on one of the tenant's conversations returns, in its turn."""
        queue = self._short_chats if chat.size < INLINE_TEXT else self._texts
        return queue.run_sized(
            chat.size, work, tenant=self._tenant, is_prompt=is_prompt, may_be_inline=False
        )

    def _spelled(self, request: wire.TokenizeRequest, max_context: int) -> bytes:
        """Return the answer to Tokenize; callable from any thread."""
        codec, text = self._codec, request.text
        has_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        if isinstance(codec, EncoderDecoderCodec) and request.target:
            ids = codec.encode_prefix(text)
        else:
            ids = _source_ids(codec, text, request.source_language, has_special=has_special)
            codec = codec.sources if isinstance(codec, EncoderDecoderCodec) else codec
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


def _source_ids(
    codec: TextCodec, text: str, language: str, *, has_special: bool
) -> tuple[int, ...]:
    """Return the ids of a prompt's text; with an encoder, of a source in a language."""
    if not isinstance(codec, EncoderDecoderCodec):
        return codec.encode(text, has_special)
    if has_special:
        return codec.encode_source(text, language)
    return codec.sources.encode(text, False)


def _answer(field: str, codec: TextCodec, ids: Sequence[int], max_context: int) -> bytes:
    """Return the answer to Tokenize of these ids, which came in ``field``."""
    response = wire.TokenizeResponse(
        ids=ids, tokens=[codec.spell(token) for token in ids], max_context=max_context
    )
    if response.ByteSize() > MAX_ANSWER_BYTES:
        rule = f"must have an answer of at most {MAX_ANSWER_BYTES} bytes; ask for it in pieces"
        raise RequestError(field, rule)
    return response.SerializeToString()
