"""All settings of ``outrider serve``, as one tree of dataclasses (``runtime.core.settings`` says how they are written).

The command line reads this module for its help, so it imports nothing that takes long to load.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from outrider.engines.bundle.signatures import read_signers
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import LIMITS, Given, Option, Panel, converted, part, setting
from outrider.runtime.serving.security.addresses import UNIX, tcp_address
from outrider.runtime.serving.security.options import SecurityOptions

Stage = Callable[[str], AbstractContextManager[object]]
_HOST, _PORT = "127.0.0.1", 50051
_PORTS = (0, 65_535)
FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error", "critical")
"""Of the log."""


def _address(given: Given) -> str:
    """Return where TCP is listened on; where only a Unix socket is asked for, that."""
    host, port, uds = (given[name] for name in ("host", "port", "uds"))
    if uds is not None and host is None and port is None:
        return f"{UNIX}{uds}"
    return tcp_address(host or _HOST, _PORT if port is None else port)


def _socket_path(given: Given) -> Path | None:
    """Return the Unix socket where it is not the only address."""
    is_alone = given["host"] is None and given["port"] is None
    path: Path | None = None if is_alone else given["uds"]
    return path


def _trusted_signers(given: Given) -> tuple[bytes, ...]:
    path = given["trusted_signers"]
    return () if path is None else read_signers(path)


def _listening(name: str, panel: Panel, on_loopback: str, anywhere: str) -> str | None:
    """Return a field for an address that ``NAME_port``, on the loopback, or ``NAME_address`` names; None for none."""

    def make(given: Given) -> str | None:
        port, address = given[f"{name}_port"], given[f"{name}_address"]
        if port is not None and address is not None:
            raise ConfigError(f"{name}_port", f"must be left out where {name}_address is given")
        found: str | None = address if port is None else f"{_HOST}:{port}"
        return found

    options = {
        f"{name}_port": Option(panel, on_loopback, int | None, bounds=_PORTS),
        f"{name}_address": Option(panel, anywhere, str | None),
    }
    return converted(None, make, None, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How a server logs; the help of each setting says what it is.

    Raises:
        ConfigError: a value is unknown.
    """

    format: str = setting(
        "console", Panel.OBSERVABILITY, "Form of lines: console or json.", option="log_format"
    )
    level: str = setting(
        "info",
        Panel.OBSERVABILITY,
        "The least that is written: debug, info, warning, error or critical.",
        option="log_level",
    )
    has_access_lines: bool = setting(
        True,
        Panel.OBSERVABILITY,
        "Write a line of each request, once it has ended.",
        option="access_log",
    )

    @property
    def is_for_people(self) -> bool:
        """Whether people read the lines as they come."""
        return self.format == "console"

    def __post_init__(self) -> None:
        for key, value, known in (
            ("log_format", self.format, FORMATS),
            ("log_level", self.level, LEVELS),
        ):
            if value not in known:
                raise ConfigError(key, f"must be one of {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Metrics, logs and traces of a server; whoever starts the process sets up ``logs``."""

    metrics_address: str | None = _listening(
        "metrics",
        Panel.OBSERVABILITY,
        "Port of the loopback for Prometheus.",
        "Address for Prometheus, HOST:PORT or unix:PATH.",
    )
    has_vllm_names: bool = setting(
        False,
        Panel.OBSERVABILITY,
        "Tell metrics under vLLM's names, too.",
        option="vllm_metric_names",
    )
    logs: LogOptions = part(LogOptions)
    otlp_endpoint: str | None = setting(
        None,
        Panel.OBSERVABILITY,
        "URL of a collector of traces, OTLP over gRPC. Default: as OTEL_ variables say.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how a process serves; the help of each setting says what it is.

    Attributes:
        address: host and port, port 0 for a free one, or ``unix:PATH``.
        socket_path: of a Unix socket to listen on besides; None for none.
        leaves_drafter: whether a bundle with serving defaults chooses the default drafter.
        leaves_gamma: whether it chooses the default gamma.
        stage: entered with the name of work that takes seconds, so that somebody can show it.
    """

    model_name: str | None = setting(
        None, Panel.BUNDLE, "Name of the model in answers. Default: the folder's name."
    )
    applies_generation_defaults: bool = setting(
        False,
        Panel.BUNDLE,
        "Give requests the checkpoint's generation_config for what they leave open.",
        option="generation_defaults",
    )
    address: str = converted(
        f"{_HOST}:{_PORT}",
        _address,
        host=Option(
            Panel.ADDRESSES,
            f"Interface to listen on; other than the loopback's with TLS only. Default: {_HOST}.",
            str | None,
        ),
        port=Option(
            Panel.ADDRESSES,
            f"Port to listen on; 0 takes a free one. Default: {_PORT}.",
            int | None,
            bounds=_PORTS,
        ),
    )
    socket_path: Path | None = converted(
        None,
        _socket_path,
        uds=Option(
            Panel.ADDRESSES,
            "Unix socket to listen on; without --host and --port nothing else is.",
            Path | None,
        ),
    )
    port_file: Path | None = setting(
        None, Panel.ADDRESSES, "File that gets the bound port, once the server is ready."
    )
    http_address: str | None = _listening(
        "http",
        Panel.ADDRESSES,
        "Port of the loopback for OpenAI's HTTP.",
        "Address for OpenAI's HTTP, HOST:PORT; other than the loopback's with TLS only.",
    )
    http_port_file: Path | None = setting(
        None, Panel.ADDRESSES, "File that gets the bound port of HTTP, once the server is ready."
    )
    has_kserve: bool = setting(
        False,
        Panel.PROTOCOLS,
        "Speak KServe's and Triton's Open Inference Protocol on the port, too.",
        option="kserve",
        flags=("--kserve",),
    )
    has_vllm_grpc: bool = setting(
        False,
        Panel.PROTOCOLS,
        "Speak the gRPC of vLLM's engine on the port, too: for the gateway smg.",
        option="vllm_grpc",
        flags=("--vllm-grpc",),
    )
    trusted_signers: tuple[bytes, ...] = converted(
        (),
        _trusted_signers,
        trusted_signers=Option(
            Panel.SECURITY,
            "Public keys, PEM: one of them must have signed the bundle (outrider sign).",
            Path | None,
        ),
    )
    security: SecurityOptions = part(SecurityOptions)
    audit_log: Path | None = setting(
        None, Panel.SECURITY, "File that gets a line of JSON per request."
    )
    config: ServerConfig = part(ServerConfig)
    max_context: int | None = setting(
        None, Panel.LIMITS, "Tokens of a slot. Default: the bundle's, as memory allows."
    )
    device: str = setting(
        "cpu",
        Panel.ENGINES,
        "Device to compute on: cpu, cuda[:N], tensorrt[:N] or auto.",
        offered="auto",
    )
    isolates_engine: bool = setting(
        False,
        Panel.ENGINES,
        "Run engines in a process of their own, which is started again where it ends.",
        option="isolate_engine",
    )
    costs_folder: Path | None = setting(
        None,
        Panel.DRAFTING,
        "Folder for measured step costs. Default: beside the bundle, or a cache of the user's.",
        option="costs",
    )
    refreshes_costs: bool = setting(
        False, Panel.DRAFTING, "Measure step costs even if they are known.", option="refresh_costs"
    )
    leaves_drafter: bool = converted(False, lambda given: given["drafter"] is None)
    leaves_gamma: bool = converted(False, lambda given: given["gamma"] is None)
    watch: WatchOptions = part(WatchOptions)
    limits: RequestLimits = part(
        RequestLimits,
        LIMITS,
        limit=Option(
            Panel.LIMITS,
            "Any other limit, NAME=VALUE (see outrider config --show); repeat for several.",
            table=LIMITS,
        ),
    )
    stage: Stage = nullcontext

    def name_of(self, root: Path) -> str:
        """Return what a bundle's model is called.

        Raises:
            ConfigError: no message can have that name.
        """
        name = self.model_name or root.resolve().name
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError("model_name", "must be UTF-8") from None
        return name
