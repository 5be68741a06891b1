"""The served model with its limits as one value, and its description for clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata

from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.validate import RequestLimits, ServedModel
from outrider.runtime.loop.worker import Worker
from outrider.runtime.serving.tokenizer import TextCodec
from outrider.v1 import inference_pb2 as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A served model with its worker, tokenizer and limits.

    Attributes:
        stall_timeout_s: seconds one response may wait to be read before the request is cut off.
        certificate: the bundle's parity certificate.
        clock: seconds; the same clock as the worker's.
    """

    worker: Worker
    codec: TextCodec
    model: ServedModel
    config: ServerConfig = field(default_factory=ServerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    certificate: Mapping[str, object] = field(default_factory=dict)
    stall_timeout_s: float = 30.0
    clock: Callable[[], float] = time.monotonic


def describe(serving: Serving) -> wire.GetServerInfoResponse:
    """Return the description of a served model and its limits, without the present load."""
    limits, config, model = serving.limits, serving.config, serving.model
    return wire.GetServerInfoResponse(
        server_version=_version(),
        model=model.name,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        limits=wire.Limits(
            max_context=model.max_context,
            max_prompt_bytes=limits.max_prompt_bytes,
            max_tokens=limits.max_tokens,
            default_max_tokens=limits.default_max_tokens,
            max_stop_strings=limits.max_stop_strings,
            max_stop_bytes=limits.max_stop_bytes,
            max_stop_token_ids=limits.max_stop_token_ids,
            max_logit_bias=limits.max_logit_bias,
            max_allowed_token_ids=limits.max_allowed_token_ids,
            max_logprobs=limits.max_logprobs,
            max_bad_words=limits.max_bad_words,
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_queued_tokens=config.max_queued_tokens,
            queue_timeout_s=config.queue_timeout_s,
            max_request_s=limits.max_request_s,
            max_message_bytes=limits.max_message_bytes,
            max_beams=min(limits.max_beams, model.max_beams),
        ),
        speculation=wire.SpeculationInfo(
            drafters=model.drafters,
            default_drafter=_default_drafter(serving),
            max_gamma=model.max_gamma,
            default_gamma=serving.worker.default_speculation.gamma,
            default_is_adaptive=serving.worker.default_speculation.is_adaptive,
            default_block_verification=config.block_verification,
            control=_control(serving.worker),
        ),
    )


def _control(worker: Worker) -> wire.Control | None:
    report = worker.snapshot().control
    return None if report is None else wire.Control(**asdict(report))


def _default_drafter(serving: Serving) -> str:
    wanted = serving.config.default_drafter
    return wanted if wanted in serving.model.drafters else "none"


def _version() -> str:
    try:
        return metadata.version("outrider-server")
    except metadata.PackageNotFoundError:
        return "uninstalled"
