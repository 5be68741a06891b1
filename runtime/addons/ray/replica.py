"""A replica of the Ray Serve application: one served model, in the replica's own process.

Methods are named as those of ``outrider.v1.Inference``, since Ray finds them by name. Ray asks for no credentials, so
nobody has proven who calls.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from outrider.runtime.addons.ray.context import CallContext, Encoded, ProxyContext
from outrider.runtime.core.errors import PermissionDenied
from outrider.runtime.core.tenant import SCOPES, TENANT_KEY, Identity, tenant_of
from outrider.runtime.serving.accounting import RequestAccounting
from outrider.runtime.serving.factory import load_model, settle_loaded
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.process import SWITCH_INTERVAL_S
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.serving.supervision.memory import use_few_arenas
from outrider.runtime.serving.supervision.supervisor import Health, Supervisor
from outrider.runtime.serving.v1.methods import Methods
from outrider.runtime.serving.v1.responses import caller_of
from outrider.v1 import inference_pb2 as wire

NOT_BELIEVED = f"metadata {TENANT_KEY}: not believed here; leave it out"


def open_process(root: Path, options: ServeOptions) -> LoadedModel:
    """Return the model of a process that serves nothing else, opened."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_few_arenas()
    serving = load_model(root, options)
    settle_loaded()
    return serving


class Replica:
    """Serves a model; Ray makes it on the event loop that its methods run on.

    Args:
        open_model: opens it.
        trusts_tenants: whether a tenant in metadata is believed.

    Attributes:
        has_failed: set once the engine is lost for good.
    """

    def __init__(
        self, open_model: Callable[[], LoadedModel], *, trusts_tenants: bool = False
    ) -> None:
        self._trusts_tenants = trusts_tenants
        self._serving = open_model()
        readiness = ServerState(RequestAccounting(Metrics(), self._serving.clock))
        self._methods = Methods(readiness)
        self._handler = readiness.open(self._serving)
        self._serving.worker.start()
        self.has_failed = asyncio.Event()
        self._supervisor = Supervisor(
            self._serving, self._handler, Health(readiness), self.has_failed
        )

    async def Generate(  # noqa: N802
        self, request: wire.GenerateRequest, grpc_context: ProxyContext
    ) -> AsyncGenerator[Encoded]:
        """Stream the completions of a prompt."""
        context = CallContext(grpc_context)
        call = self._generate(request.SerializeToString(), context, grpc_context)
        num_completions = 1 if request.num_beams > 1 else max(1, request.n)
        async with aclosing(context.stream(call, num_completions)) as messages:
            async for message in messages:
                yield message

    async def Abort(self, request: Message, grpc_context: ProxyContext) -> Encoded:  # noqa: N802
        """End live requests of this replica by the caller's ids."""
        return await CallContext(grpc_context).answer(
            self._identified(self._methods.abort, request, grpc_context)
        )

    async def Tokenize(self, request: Message, grpc_context: ProxyContext) -> Encoded:  # noqa: N802
        """Return the token ids of a text."""
        context = CallContext(grpc_context)
        call = self._tokenize(request.SerializeToString(), context, grpc_context)
        return await context.answer(call)

    async def GetServerInfo(  # noqa: N802
        self, request: Message, grpc_context: ProxyContext
    ) -> Encoded:
        """Return the description of the served model, with this replica's load."""
        return await CallContext(grpc_context).answer(
            self._identified(self._methods.get_server_info, request, grpc_context)
        )

    def check_health(self) -> None:
        """Raise where Ray is to replace this replica.

        Raises:
            RuntimeError: the worker is lost, or the model's files have changed.
        """
        if self.has_failed.is_set():
            raise RuntimeError("the engine is lost")
        if self._serving.worker.has_changed_model:
            raise RuntimeError("the model's files have changed")

    async def close(self) -> None:
        """End what still runs, and stop."""
        self._handler.close_admission()
        await asyncio.to_thread(self._serving.worker.stop, 0.0)
        await self._handler.wait_idle()
        await self._supervisor.stop()
        if self._serving.grammars is not None:
            await asyncio.to_thread(self._serving.grammars.close)
        self._serving.close()

    async def _generate(self, data: bytes, context: CallContext, proxy: ProxyContext) -> None:
        caller = caller_of(self._identity(proxy), context)
        await self._methods.generate(data, caller, context.write)

    async def _tokenize(self, data: bytes, context: CallContext, proxy: ProxyContext) -> bytes:
        caller = caller_of(self._identity(proxy), context)
        return await self._methods.tokenize(data, caller)

    async def _identified(
        self,
        method: Callable[[bytes, Identity], Coroutine[Any, Any, bytes]],
        request: Message,
        proxy: ProxyContext,
    ) -> bytes:
        return await method(request.SerializeToString(), self._identity(proxy))

    def _identity(self, proxy: ProxyContext) -> Identity:
        """Return who calls: nobody, or the tenant that he names where names are believed.

        Raises:
            PermissionDenied: they are not.
            RequestError: the name is impossible.
        """
        tenant = tenant_of(proxy.invocation_metadata())
        if tenant and not self._trusts_tenants:
            raise PermissionDenied(NOT_BELIEVED)
        return Identity(
            tenant=tenant, key=f"metadata:{tenant}" if tenant else "", scopes=frozenset(SCOPES)
        )
