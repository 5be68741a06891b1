"""What the server's process and the engine's say to each other, as values that travel pickled.

The pipe joins a process and the child that it started itself; nothing from the network is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.engines.bundle.encoder_decoder import EncoderDecoder
from outrider.engines.determinism import BitEquality
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.events import Event, PromptToken
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Speculation
from outrider.runtime.loop.totals import WorkerSnapshot
from outrider.runtime.serving.chat.files import ChatFiles
from outrider.runtime.serving.requests.defaults import RequestDefaults
from outrider.runtime.serving.settings import ServeOptions


@dataclass(frozen=True, slots=True)
class Open:
    """To the child, first: which bundle to open and how, and the interpreter's switch interval in seconds."""

    root: Path
    options: ServeOptions
    switch_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """From the child: the bundle is open, the worker waits for ``Start``.

    Attributes:
        limits: of requests, with the server's defaults in them.
        defaults: as of ``LoadedModel``.
        tokenizer: the bundle's tokenizer, as it was hashed.
        source_tokenizer: that of its sources, where they have one of their own.
        text2text: how requests become tokens, where the model has an encoder.
        certificate: the bundle's parity certificate.
        bit_equality: as of ``LoadedModel``.
        weights_are_private: as of ``LoadedModel``.
        speculation: of requests that ask for nothing in particular.
        chat: what the bundle says of conversations; None where it has no template.
        generation_defaults: as of ``LoadedModel``.
    """

    model: ServedModel
    config: ServerConfig
    limits: RequestLimits
    defaults: RequestDefaults
    tokenizer: bytes
    source_tokenizer: bytes | None
    text2text: EncoderDecoder | None
    certificate: Mapping[str, object]
    bit_equality: BitEquality
    weights_are_private: bool
    speculation: Speculation
    snapshot: WorkerSnapshot
    chat: ChatFiles | None = None
    generation_defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """From the child: the bundle or a setting cannot be used."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Changed:
    """From the child: a file that engines compute from has changed; what they answer is not to be trusted."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """From the child, whenever it has looked for work.

    Attributes:
        events: by internal id.
        snapshot: where the worker stands, now and then.
        has_stepped: whether there was work.
    """

    events: Sequence[tuple[str, Event]]
    snapshot: WorkerSnapshot | None
    has_stepped: bool


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """From the child, before a request's first event: the next tokens of its scored prompt, which that event lacks.

    A long prompt in one message would hold the server's interpreter for as long as it takes to read.
    """

    internal_id: str
    prompt: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """From the child, now and then: the step does what makes it longer than its like."""


@dataclass(frozen=True, slots=True)
class Declined:
    """From the child: a request was not queued. No sign of life: the steps may hang meanwhile."""

    internal_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Start:
    """To the child: run steps from now on."""


@dataclass(frozen=True, slots=True)
class Submit:
    """To the child: completions of one prompt; their events come as ``StepEvents``, refusals as ``Declined``."""

    specs: Sequence[RequestSpec]


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the child: end a request with an error."""

    internal_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Drain:
    """To the child: take nothing new."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the child: end all requests after so many seconds, then the process."""

    timeout_s: float


FromChild = Opened | Refused | Changed | StepEvents | ScoredPiece | Beat | Declined
ToChild = Open | Start | Submit | Cancel | Drain | Stop
