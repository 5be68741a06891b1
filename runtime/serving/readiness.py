"""The state of a server before and after its model is loaded, and the protocols that plug into it.

Ports open before a model does, so that probes learn how far the start is. Whoever takes requests of a protocol asks the
readiness for each of them: until the model is open, the answer is ``NotReady``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import grpc
from outrider.runtime.core.errors import NotReady
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.request_handler import RequestHandler
from outrider.runtime.serving.supervision.notify import notify


class _Opened(NamedTuple):
    serving: LoadedModel
    handler: RequestHandler


class ServerState:
    """What a server serves, once it is open; on the event loop.

    Args:
        accounting: has a record of each request, and of what was refused before.

    Attributes:
        is_serving: what probes are told; ``supervision.Health`` says it.
    """

    def __init__(self, accounting: RequestAccounting) -> None:
        self.accounting = accounting
        self.is_serving = False
        self._stage = ""
        self._opened: _Opened | None = None

    def note(self, stage: str) -> None:
        """Say what the start is at; callable from any thread."""
        self._stage = stage
        notify(status=stage)

    @property
    def stage(self) -> str:
        """Return what the start is at; empty where nobody has said."""
        return self._stage

    def open(self, serving: LoadedModel) -> RequestHandler:
        """Take requests from now on, and return who does."""
        handler = RequestHandler(serving, self.accounting)
        self._opened = _Opened(serving, handler)
        return handler

    @property
    def is_open(self) -> bool:
        """Return whether the model is open; it may be draining."""
        return self._opened is not None

    @property
    def is_ready(self) -> bool:
        """Return whether requests are taken: the model is open, has an engine, and stays."""
        if self._opened is None:
            return False
        worker = self._opened.serving.worker
        is_served = worker.is_ready and not worker.has_changed_model
        return is_served and not self._opened.handler.is_draining

    @property
    def serving(self) -> LoadedModel:
        """The served model.

        Raises:
            NotReady: it is not open yet.
        """
        return self._get().serving

    @property
    def handler(self) -> RequestHandler:
        """Who takes requests.

        Raises:
            NotReady: the model is not open yet.
        """
        return self._get().handler

    def _get(self) -> _Opened:
        if self._opened is None:
            raise NotReady(self._stage)
        return self._opened


class Service(Protocol):
    """A protocol that gRPC carries."""

    @property
    def name(self) -> str:
        """The service's full name, for reflection."""
        ...

    @property
    def scopes(self) -> Mapping[str, str]:
        """Return what a caller needs, by name of the method; what has no scope is allowed to nobody."""
        ...

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all its methods."""
        ...


class Listener(Protocol):
    """Another way in than gRPC."""

    async def start(self) -> None:
        """Listen, before the model is open.

        Raises:
            ConfigError: the address cannot be bound.
        """
        ...

    @property
    def places(self) -> Mapping[int, int]:
        """How many connections it may have, by port, once it has started; empty of a Unix socket."""
        ...

    async def stop(self) -> None:
        """Stop listening, when a drain has answered everybody, or the start has failed."""
        ...
