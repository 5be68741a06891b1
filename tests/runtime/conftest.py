import contextlib
import string
import sys
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import grpc
import numpy as np
import pytest
from outrider import Client
from outrider.engines.base import EngineLimits, FloatArray, Span
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import AUTO
from outrider.runtime.core.params import GrammarKind
from outrider.runtime.drafters.text.suffix_array import Datastore
from outrider.runtime.gamma.costs import CostTable
from outrider.runtime.grammar.compile import GrammarCompiler
from outrider.runtime.grammar.constraint import GrammarConstraints
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.tracing import Spans
from outrider.runtime.serving.process import SWITCH_INTERVAL_S
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.security.access import Security
from outrider.runtime.serving.security.audit import AuditLog
from outrider.runtime.serving.server import Server
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.tokenizer import TextCodec, TokenizersCodec
from outrider.v1 import inference_pb2 as wire

from tests.runtime.served import MakeListeners, begin, server_of
from tests.runtime.watched import watched as watched

ALPHABET = string.ascii_lowercase + " é"
EOS = len(ALPHABET)
VOCAB = EOS + 1
CONTEXT = 4200
MAX_GAMMA = 4

# More tokens than any machine makes while a test lasts.
ENDLESS_TOKENS = 1_000_000


class LetterCodec:
    """A tokenizer of one token per letter, so that texts can be written down in tests."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(ALPHABET.index(letter) for letter in text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(
            ALPHABET[i] if i < EOS else "" if skip_special_tokens else "</s>" for i in ids
        )

    def spell(self, token: int) -> str:
        return self.decode((token,), skip_special_tokens=False)


def next_letter(prefix: tuple[int, ...]) -> FloatArray:
    """The alphabet in a circle, without end of sequence; the draft is wrong after every e."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[(prefix[-1] + 1) % 26] = 9.0
    logits[EOS] = -9.0
    return logits


def wrong_after_e(prefix: tuple[int, ...]) -> FloatArray:
    return next_letter((prefix[-1] + 7,)) if prefix[-1] == 4 else next_letter(prefix)


class LetterEngine(ScriptedEngine):
    """Works outside the interpreter in each step, as engines of native code do: others' threads run meanwhile."""

    _WORK = bytes(1 << 20)

    def extend(self, spans: Sequence[Span]) -> FloatArray:
        zlib.crc32(self._WORK)
        return super().extend(spans)


@dataclass(frozen=True)
class Running:
    client: Client
    server: Server
    serving: LoadedModel
    address: str

    def endless(self, **options: Any) -> AsyncGenerator[wire.GenerateResponse]:
        """A request that runs until something ends it, on a server of ``start_endless``."""
        return self.client.generate(
            "a",
            max_tokens=ENDLESS_TOKENS - 1,
            temperature=0.0,
            speculation={"enabled": False},
            **options,
        )


ENDS_AT_ONCE = ServerConfig(lb_delay_s=0.0, drain_timeout_s=0.0)
ANY_LIMITS = RequestLimits()

Start = Callable[..., AbstractAsyncContextManager[Running]]


@contextlib.asynccontextmanager
async def running(
    *,
    config: ServerConfig = ENDS_AT_ONCE,
    limits: RequestLimits = ANY_LIMITS,
    max_batch: int = 4,
    max_context: int = CONTEXT,
    max_token_bytes: int | None = None,
    max_tree_nodes: int = 0,
    target: Callable[..., FloatArray] = next_letter,
    draft: Callable[..., FloatArray] = wrong_after_e,
    vocab_size: int = VOCAB,
    max_source: int = 0,
    banned_token_ids: tuple[int, ...] = (),
    defaults: RequestDefaults = NO_DEFAULTS,
    failing_extends: Sequence[int] = (),
    stall_timeout_s: float = 30.0,
    options: Sequence[tuple[str, Any]] = (),
    clock: Callable[[], float] = time.monotonic,
    costs: CostTable | None = None,
    host: str = "127.0.0.1",
    codec: TextCodec | None = None,
    tokenizer: bytes | None = None,
    chats: ChatEncoder | None = None,
    generation_defaults: Mapping[str, object] | None = None,
    security: Security | None = None,
    audit: AuditLog | None = None,
    has_access_lines: bool = False,
    spans: Spans | None = None,
    addresses: Sequence[str] = (),
    serve_options: ServeOptions | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    listeners: MakeListeners = lambda readiness, security: (),
) -> AsyncIterator[Running]:
    config = replace(config, stall_timeout_s=stall_timeout_s)
    engine_limits = EngineLimits(
        max_batch=max_batch,
        max_context=max_context,
        max_extend=512,
        vocab_size=vocab_size,
        max_tree_nodes=max_tree_nodes,
        max_source=max_source,
    )
    constraints = grammars = None
    if tokenizer is not None:
        codec = TokenizersCodec(tokenizer)
        constraints = GrammarConstraints(tokenizer, vocab_size, (EOS,))
        grammars = GrammarCompiler(tokenizer, vocab_size, (EOS,), constraints=constraints)
    codec = codec or LetterCodec()
    worker = Worker(
        ServedEngines(
            target=LetterEngine(target, engine_limits, failing_extends=failing_extends),
            draft=LetterEngine(draft, engine_limits),
            sampler=CpuSampler(max_batch=max_batch, max_gamma=MAX_GAMMA, vocab_size=vocab_size),
            max_gamma=MAX_GAMMA,
            costs=costs,
        ),
        config=config,
        decoder=codec,
        clock=clock,
        constraints=constraints,
    )
    model = ServedModel(
        name="letters",
        vocab_size=vocab_size,
        max_context=max_context,
        max_token_bytes=max_token_bytes,
        max_gamma=MAX_GAMMA,
        eos_token_ids=(EOS,),
        drafters=(*worker.drafter_names, AUTO),
        guessers=worker.guesser_names,
        can_adapt=costs is not None,
        max_beams=worker.max_beams,
        max_source=max_source,
        source_vocab_size=vocab_size if max_source else 0,
        banned_token_ids=banned_token_ids,
        constraints=() if constraints is None else tuple(GrammarKind),
        chat_templates=() if chats is None else chats.names,
    )
    serving = LoadedModel(
        worker=worker,
        codec=codec,
        model=model,
        config=config,
        limits=limits,
        defaults=defaults,
        clock=clock,
        grammars=grammars,
        chats=chats,
        generation_defaults=generation_defaults or {},
    )
    server = server_of(
        serving,
        security=security,
        options=serve_options,
        listeners=listeners,
        audit=audit,
        has_access_lines=has_access_lines,
        spans=spans,
    )
    port = await begin(server, serving, f"{host}:0", *addresses)
    address = f"{host}:{port}"
    options = (("grpc.enable_retries", 0), *options)
    # As a server's process does.
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with Client(address, credentials=credentials, options=options) as client:
        try:
            yield Running(client, server, serving, address)
        finally:
            server.hurry()
            await server.drain()
            sys.setswitchinterval(before_s)


@pytest.fixture
def start() -> Start:
    return running


@pytest.fixture
def start_endless() -> Start:
    """As ``start``, for ``Running.endless``: nobody is cut off for not reading unless told so."""

    def begin(
        *,
        config: ServerConfig = ENDS_AT_ONCE,
        limits: RequestLimits = ANY_LIMITS,
        max_unsent_chunks: int = ENDLESS_TOKENS,
        **options: Any,
    ) -> AbstractAsyncContextManager[Running]:
        return running(
            config=replace(config, max_unsent_chunks=max_unsent_chunks),
            limits=replace(limits, max_tokens=ENDLESS_TOKENS),
            max_context=ENDLESS_TOKENS,
            **options,
        )

    return begin


@pytest.fixture
def corpora_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For walks of all noise, which make a worker for each of thousands of runs: its files are mapped by the first."""
    monkeypatch.setattr(Datastore, "open", cache(Datastore.open))
