"""The methods of ``outrider.v1`` on bytes, whatever carries them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from outrider.runtime.core.checks.rules import check_text
from outrider.runtime.core.tenant import Identity
from outrider.runtime.serving.loaded_model import describe
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.requests.checks import check_served_chat
from outrider.runtime.serving.requests.client import ClientIdentity
from outrider.runtime.serving.requests.spec import chat_of
from outrider.runtime.serving.v1.generate_request import V1Request
from outrider.runtime.serving.v1.wire import check_tokenize, parse
from outrider.v1 import inference_pb2 as wire


class Methods:
    """Answers the methods of ``outrider.v1``; raises ``ServingError`` for a refusal."""

    def __init__(self, readiness: ServerState) -> None:
        self._readiness = readiness

    async def generate(
        self,
        data: bytes,
        caller: ClientIdentity,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Stream the completions of a prompt; ``send`` is as of ``V1Request``."""
        readiness = self._readiness
        call = V1Request(readiness.serving, data, caller, send)
        await readiness.handler.complete(call)

    async def abort(self, data: bytes, identity: Identity) -> bytes:
        """End live requests by the caller's ids."""
        handler = self._readiness.handler
        request_ids = parse(wire.AbortRequest, data).request_ids
        aborted = handler.abort(request_ids, identity.tenant)
        return wire.AbortResponse(aborted=aborted).SerializeToString()

    async def tokenize(self, data: bytes, caller: ClientIdentity) -> bytes:
        """Return the token ids of a text."""
        serving, handler = self._readiness.serving, self._readiness.handler
        encoder = handler.encoder_for("Tokenize", caller)
        request = parse(wire.TokenizeRequest, data)
        model, limits = serving.model, serving.limits
        check_text("text", request.text, limits.max_prompt_bytes)
        has_encoder = model.max_source > 0
        check_tokenize(request, has_encoder=has_encoder, max_messages=limits.max_messages)
        if request.HasField("chat"):
            check_served_chat(request.chat, serving.rules)
            return await encoder.tokenize_chat(chat_of(request.chat), model.max_context)
        return await encoder.tokenize(request, model.max_context)

    async def get_server_info(self, data: bytes, identity: Identity) -> bytes:
        """Return the description of the served model."""
        serving = self._readiness.serving
        parse(wire.GetServerInfoRequest, data)
        response = describe(serving)
        limits, rules = response.limits, identity.rules
        limits.min_priority, limits.max_priority = rules.priorities
        snapshot = serving.worker.snapshot()
        response.load.num_running = snapshot.num_running
        response.load.num_queued = snapshot.num_queued
        response.load.num_slots = snapshot.num_slots
        response.load.num_free_slots = snapshot.num_free_slots
        response.load.is_draining = self._readiness.handler.is_draining
        if serving.certificate:
            response.certificate_json = json.dumps(dict(serving.certificate), sort_keys=True)
        return response.SerializeToString()
