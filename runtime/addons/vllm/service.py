"""The service ``vllm.grpc.engine.VllmEngine``; methods that it has elsewhere and not here are UNIMPLEMENTED."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

import grpc
from outrider.runtime.addons.vllm.engine_request import EngineRequest
from outrider.runtime.addons.vllm.tokenizer_files import Archive, tokenizer_archive
from outrider.runtime.core.errors import SlowConsumer
from outrider.runtime.serving.observability.process import server_version
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security import grpc_gate
from outrider.runtime.serving.v1.responses import Context, Sender, answered, caller_of
from outrider.runtime.serving.v1.wire import parse
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name
# What gateways know the protocol by.
_SERVER_TYPE = "vllm-grpc"
_CHUNK_BYTES = 1 << 20


class VllmEngineService:
    """Handlers of vLLM's engine protocol."""

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Generate": "generate",
        "Abort": "generate",
        "HealthCheck": "info",
        "GetModelInfo": "info",
        "GetServerInfo": "info",
        "GetLoads": "info",
        "GetTokenizer": "info",
    }

    def __init__(self, readiness: ServerState) -> None:
        self._readiness = readiness
        self._archive: Archive | None = None
        self._packing = asyncio.Lock()
        self._opened_s = readiness.accounting.clock()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods that are served."""
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": stream(self.generate),
                "Abort": unary(self.abort),
                "HealthCheck": unary(self.health_check),
                "GetModelInfo": unary(self.get_model_info),
                "GetServerInfo": unary(self.get_server_info),
                "GetLoads": unary(self.get_loads),
                "GetTokenizer": stream(self.get_tokenizer),
            },
        )

    async def generate(self, data: bytes, context: Context) -> None:
        """Stream the token ids of the completions of a prompt."""
        sender = Sender(context)
        await answered("Generate", context, self._generate(data, context, sender), sender)

    async def abort(self, data: bytes, context: Context) -> bytes:
        """End live requests by the caller's ids."""
        return await answered("Abort", context, self._abort(data))

    async def health_check(self, data: bytes, context: Context) -> bytes:
        """Return whether requests are taken."""
        is_ready = self._readiness.is_ready
        message = "" if is_ready else self._readiness.stage or "not ready"
        answer = vllm.HealthCheckResponse(healthy=is_ready, message=message)
        return answer.SerializeToString()

    async def get_model_info(self, data: bytes, context: Context) -> bytes:
        """Return what the model is called and how long its texts may be."""
        return await answered("GetModelInfo", context, self._get_model_info())

    async def get_server_info(self, data: bytes, context: Context) -> bytes:
        """Return what the server is at."""
        return await answered("GetServerInfo", context, self._get_server_info())

    async def get_loads(self, data: bytes, context: Context) -> bytes:
        """Return how busy the server is."""
        return await answered("GetLoads", context, self._get_loads())

    async def get_tokenizer(self, data: bytes, context: Context) -> None:
        """Stream the archive of the tokenizer's files, and at its end the hash."""
        sender = Sender(context)
        await answered("GetTokenizer", context, self._get_tokenizer(sender), sender)

    async def _generate(self, data: bytes, context: Context, sender: Sender) -> None:
        readiness, caller = (
            self._readiness,
            caller_of(grpc_gate.identity(), context, protocol="vllm"),
        )
        await readiness.handler.complete(EngineRequest(readiness.serving, data, caller, sender))

    async def _abort(self, data: bytes) -> bytes:
        request_ids = parse(vllm.AbortRequest, data).request_ids
        self._readiness.handler.abort(request_ids, grpc_gate.identity().tenant)
        return vllm.AbortResponse().SerializeToString()

    async def _get_model_info(self) -> bytes:
        model = self._readiness.serving.model
        answer = vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=model.max_context,
            max_req_input_len=model.max_context - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        return answer.SerializeToString()

    async def _get_server_info(self) -> bytes:
        readiness = self._readiness
        snapshot = readiness.serving.worker.snapshot()
        answer = vllm.GetServerInfoResponse(
            server_type=_SERVER_TYPE,
            active_requests=snapshot.num_running + snapshot.num_queued,
            is_paused=readiness.handler.is_draining,
            uptime_seconds=readiness.accounting.clock() - self._opened_s,
            data_parallel_size=1,
            max_num_seqs=snapshot.num_slots,
            constrained_decoding_start="first_token",
        )
        return answer.SerializeToString()

    async def _get_loads(self) -> bytes:
        snapshot = self._readiness.serving.worker.snapshot()
        load = vllm.SchedulerLoad(
            num_running_reqs=snapshot.num_running,
            num_waiting_reqs=snapshot.num_queued,
            num_total_reqs=snapshot.num_running + snapshot.num_queued,
            max_running_requests=snapshot.num_slots,
            utilization=1.0 - snapshot.num_free_slots / snapshot.num_slots,
        )
        answer = vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=server_version(),
            dp_rank_count=1,
            loads=[load],
        )
        return answer.SerializeToString()

    async def _get_tokenizer(self, sender: Sender) -> None:
        archive, stall_s = await self._packed(), self._readiness.serving.config.stall_timeout_s
        for start in range(0, len(archive.data), _CHUNK_BYTES):
            chunk = common.GetTokenizerChunk(data=archive.data[start : start + _CHUNK_BYTES])
            if start + _CHUNK_BYTES >= len(archive.data):
                chunk.sha256 = archive.sha256
            try:
                async with asyncio.timeout(stall_s):
                    await sender(chunk.SerializeToString())
            except TimeoutError as error:
                raise SlowConsumer from error

    async def _packed(self) -> Archive:
        """Return the archive, made when it is first asked for, beside the event loop."""
        serving = self._readiness.serving
        async with self._packing:
            if self._archive is None:
                self._archive = await asyncio.to_thread(tokenizer_archive, serving)
        return self._archive
