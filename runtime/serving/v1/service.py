"""The dialect ``outrider.v1``: a gRPC service that answers every error by one table.

Handlers take bytes and parse them here: grpc.aio answers a failed deserializer with UNKNOWN.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable
from typing import TypeVar

import grpc
import grpc.aio
from outrider.runtime.core import errors
from outrider.runtime.core.options import check_text
from outrider.runtime.core.validate import check_model_chat
from outrider.runtime.serving.doors import gate
from outrider.runtime.serving.intake import Intake
from outrider.runtime.serving.ledger import Caller
from outrider.runtime.serving.served_model import describe
from outrider.runtime.serving.status import trailing_status
from outrider.runtime.serving.v1.generate_call import Context, GenerateCall
from outrider.runtime.serving.v1.wire import chat_of, check_tokenize, parse
from outrider.v1 import inference_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Inference"].full_name

log = logging.getLogger(__name__)

T = TypeVar("T")


class InferenceService:
    """Handlers of ``outrider.v1.Inference`` over what ``intake`` serves."""

    name = SERVICE

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

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
        await self._answer("Generate", context, self._generate(data, context))

    async def abort(self, data: bytes, context: Context) -> bytes:
        """End live requests by the caller's ids."""
        return await self._answer("Abort", context, self._abort(data))

    async def tokenize(self, data: bytes, context: Context) -> bytes:
        """Return the token ids of a text."""
        return await self._answer("Tokenize", context, self._tokenize(data, context))

    async def get_server_info(self, data: bytes, context: Context) -> bytes:
        """Return the description of the served model."""
        return await self._answer("GetServerInfo", context, self._get_server_info(data))

    async def _answer(self, method: str, context: Context, call: Awaitable[T]) -> T:
        """Run a handler and answer any exception with a status of the table, never UNKNOWN."""
        try:
            return await call
        except errors.ServingError as error:
            failure = error
        except Exception as error:
            if context.done():
                raise asyncio.CancelledError from error  # the client went away during a write
            failure = errors.InternalError(uuid.uuid4().hex)
            log.exception("%s: internal error %s", method, failure.error_id)
        code, message, trailing = trailing_status(failure)
        await context.abort(code, message, trailing)
        raise AssertionError("abort raises")

    async def _generate(self, data: bytes, context: Context) -> None:
        intake = self._intake
        call = GenerateCall(intake.serving, data, context, gate.identity())
        await intake.frontend.complete(call)

    async def _abort(self, data: bytes) -> bytes:
        frontend = self._intake.frontend
        request_ids = parse(wire.AbortRequest, data).request_ids
        aborted = frontend.abort(request_ids, gate.identity().tenant)
        return wire.AbortResponse(aborted=aborted).SerializeToString()

    async def _tokenize(self, data: bytes, context: Context) -> bytes:
        serving, frontend = self._intake.serving, self._intake.frontend
        request = parse(wire.TokenizeRequest, data)
        model, limits = serving.model, serving.limits
        check_text("text", request.text, limits.max_prompt_bytes)
        has_encoder = model.max_source > 0
        check_tokenize(request, has_encoder=has_encoder, max_messages=limits.max_messages)
        encoder = frontend.encoder_for("Tokenize", _caller(context))
        if request.HasField("chat"):
            chat = chat_of(request.chat)
            check_model_chat(chat, limits, model)
            return await encoder.tokenize_chat(chat, model.max_context)
        return await encoder.tokenize(request, model.max_context)

    async def _get_server_info(self, data: bytes) -> bytes:
        serving = self._intake.serving
        parse(wire.GetServerInfoRequest, data)
        response = describe(serving)
        limits, rules = response.limits, gate.identity().rules
        limits.min_priority, limits.max_priority = rules.priorities
        snapshot = serving.worker.snapshot()
        response.load.num_running = snapshot.num_running
        response.load.num_queued = snapshot.num_queued
        response.load.num_slots = snapshot.num_slots
        response.load.num_free_slots = snapshot.num_free_slots
        response.load.is_draining = self._intake.frontend.is_draining
        if serving.certificate:
            response.certificate_json = json.dumps(dict(serving.certificate), sort_keys=True)
        return response.SerializeToString()


def _caller(context: Context) -> Caller:
    identity = gate.identity()
    return Caller(
        tenant=identity.tenant, rules=identity.rules, key=identity.key, peer=context.peer()
    )
