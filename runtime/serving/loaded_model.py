"""The served model with its limits as one value, and its description for clients."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.encoder_decoder import LANGUAGE
from outrider.engines.determinism import BitEquality
from outrider.engines.rounds import do_nothing
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Speculation
from outrider.runtime.core.tenant import ANY_CLAIM, PRIORITIES, Claim
from outrider.runtime.grammar.compile import GrammarCompiler
from outrider.runtime.loop.event_queue import Deliver
from outrider.runtime.loop.totals import Heartbeat, WorkerSnapshot
from outrider.runtime.serving.chat.conversation import TRUSTED_ROLES
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.chat.formats import NO_FORMAT
from outrider.runtime.serving.observability.process import server_version
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.defaults import NO_DEFAULTS, RequestDefaults
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TextCodec
from outrider.v1 import inference_pb2 as wire

# Limits of the wire that are ``RequestLimits`` of the same name; beams and n are bounded by the slots too.
_OF_REQUESTS = {*wire.Limits.DESCRIPTOR.fields_by_name} - {
    "max_beams",
    "max_n",
    "max_source_tokens",
}


class ModelWorker(Protocol):
    """The methods of a worker that serving calls, in this process or another: see ``runtime.loop.worker.Worker``."""

    heartbeat: Heartbeat

    @property
    def is_ready(self) -> bool:
        """Return whether there is an engine; False while one is being replaced."""
        ...

    @property
    def has_changed_model(self) -> bool:
        """Return whether the engine's process says that a file which it computes from has changed."""
        ...

    @property
    def num_restarts(self) -> int:
        """Engines that another one has replaced."""
        ...

    def start(self) -> None:
        """Run steps until ``stop``."""
        ...

    def after_step(self, call: Callable[[], None]) -> None:
        """Call something after each step's events."""
        ...

    def submit_group(self, specs: Sequence[RequestSpec], delivers: Sequence[Deliver]) -> None:
        """Queue completions of one prompt, all or none; the events of ``specs[i]`` go to ``delivers[i]``."""
        ...

    def check_room(
        self, num_slots: int, num_tokens: int, num_ahead: int = 0, claim: Claim = ANY_CLAIM
    ) -> None:
        """Refuse a request that ``submit`` would refuse now, behind so many others on their way to the queue."""
        ...

    def cancel(self, internal_id: str, error: Exception) -> None:
        """End a request with ``error``."""
        ...

    def is_queued(self, internal_id: str) -> bool:
        """Return whether a request waits for a slot."""
        ...

    @property
    def default_speculation(self) -> Speculation:
        """How a request that asks for nothing in particular is drafted for."""
        ...

    def snapshot(self) -> WorkerSnapshot:
        """Where the worker stands."""
        ...

    def drain(self) -> None:
        """Refuse new requests and end the queued ones."""
        ...

    def restart(self, complaint: str) -> bool:
        """Replace the engine, which hangs; False where nothing can."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Drain, end what still runs after ``timeout_s``, and say whether everything ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A served model with its worker, tokenizer and limits.

    Attributes:
        codec: a ``EncoderDecoderCodec`` where the model has an encoder.
        defaults: of what requests leave open.
        certificate: the bundle's parity certificate.
        clock: seconds; the same clock as the worker's.
        bit_equality: what is known of the claim that a row's bits depend on nothing beside it.
        weights_are_private: whether engines compute from memory that nobody else can write to.
        mapped: the bundle, if engines of this process compute from its files, so that these must be watched; else None.
        file_watch_s: seconds between two looks at them.
        close: frees the engines of this process, after ``worker.stop``.
        grammars: tries the grammars of requests; None where the model serves no ``constraints``.
        chats: renders conversations; None where the bundle has no template.
        generation_defaults: what the checkpoint asks for in generation, applied or not; JSON values.
    """

    worker: ModelWorker
    codec: TextCodec
    model: ServedModel
    config: ServerConfig = field(default_factory=ServerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    defaults: RequestDefaults = NO_DEFAULTS
    certificate: Mapping[str, object] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    bit_equality: BitEquality = BitEquality.NOT_CLAIMED
    weights_are_private: bool = True
    mapped: Bundle | None = None
    file_watch_s: float = 5.0
    close: Callable[[], None] = do_nothing
    grammars: GrammarCompiler | None = None
    chats: ChatEncoder | None = None
    generation_defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def rules(self) -> RequestRules:
        """What requests are checked against."""
        answers = NO_FORMAT if self.chats is None else self.chats.answers
        return RequestRules(self.limits, self.model, answers)


def describe(serving: LoadedModel) -> wire.GetServerInfoResponse:
    """Return the description of a served model and its limits, without the present load."""
    limits, config, model = serving.limits, serving.config, serving.model
    return wire.GetServerInfoResponse(
        server_version=server_version(),
        model=model.name,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        limits=wire.Limits(
            max_context=model.max_context,
            **{name: value for name, value in asdict(limits).items() if name in _OF_REQUESTS},
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_queued_tokens=config.max_queued_tokens,
            queue_timeout_s=config.queue_timeout_s,
            max_beams=min(limits.max_beams, model.max_beams),
            max_n=min(limits.max_n, model.max_beams),
            max_source_tokens=model.max_source,
            prefix_cache_bytes=config.prefix_cache_bytes,
            cache_bytes_per_token=model.cache_bytes_per_token,
            min_priority=PRIORITIES[0],
            max_priority=PRIORITIES[1],
        ),
        speculation=wire.SpeculationInfo(
            drafters=model.drafters,
            default_drafter=_default_drafter(serving),
            max_gamma=model.max_gamma,
            default_gamma=serving.worker.default_speculation.gamma,
            default_is_adaptive=serving.worker.default_speculation.is_adaptive,
            default_block_verification=serving.worker.default_speculation.verifies_block,
            control=_control(serving.worker),
        ),
        engine=wire.EngineInfo(
            weights_are_private=serving.weights_are_private,
            bit_equality=f"BIT_EQUALITY_{serving.bit_equality.name}",
        ),
        text_to_text=_text_to_text(serving),
        constraints=model.constraints,
        gained_by_export=model.gained_by_export,
        chat=_chat(serving),
        generation_defaults_json=_generation_defaults(serving),
        applies_generation_defaults=serving.defaults != NO_DEFAULTS,
    )


def _chat(serving: LoadedModel) -> wire.ChatInfo | None:
    if serving.chats is None:
        return None
    answers = serving.chats.answers
    return wire.ChatInfo(
        templates=serving.chats.names,
        control_token_roles=TRUSTED_ROLES,
        tool_call_format="" if answers.calls is None else answers.calls.name,
        reasoning_marks=answers.reasoning or (),
    )


def _generation_defaults(serving: LoadedModel) -> str:
    asked = dict(serving.generation_defaults)
    return json.dumps(asked, sort_keys=True) if asked else ""


def _text_to_text(serving: LoadedModel) -> wire.TextToTextInfo | None:
    codec = serving.codec
    if not isinstance(codec, EncoderDecoderCodec):
        return None
    encoder_decoder = codec.text2text
    return wire.TextToTextInfo(
        languages=encoder_decoder.languages,
        default_source_language=encoder_decoder.default_source_language,
        default_target_language=encoder_decoder.default_target_language,
        has_source_language=LANGUAGE in encoder_decoder.source_template,
        has_target_language=LANGUAGE in encoder_decoder.decoder_prefix,
        decoder_prefix=[
            wire.PrefixToken(id=one if isinstance(one, int) else None)
            for one in encoder_decoder.decoder_prefix
        ],
        banned_token_ids=encoder_decoder.banned_token_ids,
        generation_defaults_json=json.dumps(
            dict(encoder_decoder.generation_defaults), sort_keys=True
        ),
        applies_generation_defaults=serving.defaults != NO_DEFAULTS,
    )


def _control(worker: ModelWorker) -> wire.Control | None:
    report = worker.snapshot().control
    return None if report is None else wire.Control(**asdict(report))


def _default_drafter(serving: LoadedModel) -> str:
    wanted = serving.config.default_drafter
    return wanted if wanted in serving.model.drafters else "none"
