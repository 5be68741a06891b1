"""Client of an Outrider server; ``LLM`` of the server's distribution runs a bundle without one."""

from typing import TYPE_CHECKING, Any

from outrider.affinity import affinity_metadata
from outrider.client import Client
from outrider.errors import (
    CallCancelled,
    CallError,
    DeadlineExceeded,
    DeadlineUnreachable,
    FieldViolation,
    Hopeless,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RequestRefused,
    ServerFailed,
    Unauthenticated,
    Unavailable,
)
from outrider.options import SamplingParams, SpeculationParams, build_request
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sync_client import SyncClient

if TYPE_CHECKING:
    from outrider.runtime.offline.llm import LLM as LLM

__all__ = [
    "CallCancelled",
    "CallError",
    "Client",
    "CompletionOutput",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "FieldViolation",
    "Hopeless",
    "Overloaded",
    "PermissionDenied",
    "QuotaExceeded",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "ServerFailed",
    "SpeculationParams",
    "SyncClient",
    "Unauthenticated",
    "Unavailable",
    "affinity_metadata",
    "build_request",
]


def __dir__() -> list[str]:
    """Name ``LLM``, too, where the server's distribution is installed."""
    from outrider.absent import has_server

    return sorted({*globals(), *(["LLM"] if has_server() else [])})


def __getattr__(name: str) -> Any:
    """Return the version of the client; import ``LLM`` when it is asked for: the client is installed without it.

    Raises:
        ImportError: the server's distribution, or a library of it, is not installed; says which.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("outrider")
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.absent import import_of_server

    return import_of_server("outrider.runtime.offline.llm", "LLM", extra="cpu")
