"""The protocol ``outrider.v1``: a gRPC service that answers every error by one table.

Handlers take bytes and parse them here: grpc.aio answers a failed deserializer with UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security import grpc_gate
from outrider.runtime.serving.v1.methods import Methods
from outrider.runtime.serving.v1.responses import Context, Sender, answered, caller_of
from outrider.v1 import inference_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService:
    """Handlers of ``outrider.v1.Inference``."""

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Generate": "generate",
        "Abort": "generate",
        "Tokenize": "generate",
        "GetServerInfo": "info",
    }

    def __init__(self, readiness: ServerState) -> None:
        self._methods = Methods(readiness)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods, for ``server.add_generic_rpc_handlers``."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Abort": unary(self.abort),
                "Tokenize": unary(self.tokenize),
                "GetServerInfo": unary(self.get_server_info),
            },
        )

    async def generate(self, data: bytes, context: Context) -> None:
        """Stream the completions of a prompt."""
        caller, sender = caller_of(grpc_gate.identity(), context), Sender(context)
        await answered("Generate", context, self._methods.generate(data, caller, sender), sender)

    async def abort(self, data: bytes, context: Context) -> bytes:
        """End live requests by the caller's ids."""
        return await answered("Abort", context, self._methods.abort(data, grpc_gate.identity()))

    async def tokenize(self, data: bytes, context: Context) -> bytes:
        """Return the token ids of a text."""
        caller = caller_of(grpc_gate.identity(), context)
        return await answered("Tokenize", context, self._methods.tokenize(data, caller))

    async def get_server_info(self, data: bytes, context: Context) -> bytes:
        """Return the description of the served model."""
        call = self._methods.get_server_info(data, grpc_gate.identity())
        return await answered("GetServerInfo", context, call)
