"""The service ``inference.GRPCInferenceService``; methods that it has elsewhere and not here are UNIMPLEMENTED."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from outrider.oip import inference_pb2 as oip
from outrider.runtime.addons.kserve.infer_request import (
    INPUTS,
    VERSION,
    InferRequest,
    is_served,
)
from outrider.runtime.addons.kserve.response import OUTPUTS
from outrider.runtime.addons.kserve.stream import InferStream
from outrider.runtime.core.errors import ModelNotFound
from outrider.runtime.serving.observability.process import server_version
from outrider.runtime.serving.readiness import ServerState
from outrider.runtime.serving.security import grpc_gate
from outrider.runtime.serving.v1.responses import Context, answered, caller_of
from outrider.runtime.serving.v1.wire import parse

SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class OpenInferenceService:
    """Handlers of the Open Inference Protocol."""

    name = SERVICE
    scopes: Mapping[str, str] = {
        "ModelInfer": "generate",
        "ModelStreamInfer": "generate",
        "ServerLive": "info",
        "ServerReady": "info",
        "ModelReady": "info",
        "ServerMetadata": "info",
        "ModelMetadata": "info",
    }

    def __init__(self, readiness: ServerState) -> None:
        self._readiness = readiness

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods that are served."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "ServerLive": unary(self.server_live),
                "ServerReady": unary(self.server_ready),
                "ModelReady": unary(self.model_ready),
                "ServerMetadata": unary(self.server_metadata),
                "ModelMetadata": unary(self.model_metadata),
                "ModelInfer": unary(self.model_infer),
                "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.model_stream_infer),
            },
        )

    async def server_live(self, data: bytes, context: Context) -> bytes:
        """Return that the process answers."""
        return oip.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, data: bytes, context: Context) -> bytes:
        """Return whether requests are taken."""
        return oip.ServerReadyResponse(ready=self._readiness.is_ready).SerializeToString()

    async def model_ready(self, data: bytes, context: Context) -> bytes:
        """Return whether requests are taken for a model."""
        return await answered("ModelReady", context, self._model_ready(data))

    async def server_metadata(self, data: bytes, context: Context) -> bytes:
        """Return what serves."""
        answer = oip.ServerMetadataResponse(name="outrider", version=server_version())
        return answer.SerializeToString()

    async def model_metadata(self, data: bytes, context: Context) -> bytes:
        """Return the tensors of a model."""
        return await answered("ModelMetadata", context, self._model_metadata(data))

    async def model_infer(self, data: bytes, context: Context) -> bytes:
        """Return the answer to a request, whole."""
        return await answered("ModelInfer", context, self._model_infer(data, context))

    async def model_stream_infer(self, requests: object, context: Context) -> None:
        """Answer the requests of a stream side by side, until it ends."""
        stream = InferStream(self._readiness, grpc_gate.identity(), context)
        await answered("ModelStreamInfer", context, stream.answer_all())

    async def _model_ready(self, data: bytes) -> bytes:
        request, is_ready = parse(oip.ModelReadyRequest, data), False
        if self._readiness.is_ready:
            is_ready = is_served(request.name, request.version, self._readiness.serving)
        return oip.ModelReadyResponse(ready=is_ready).SerializeToString()

    async def _model_metadata(self, data: bytes) -> bytes:
        request, serving = parse(oip.ModelMetadataRequest, data), self._readiness.serving
        if not is_served(request.name, request.version, serving):
            raise ModelNotFound
        answer = oip.ModelMetadataResponse(
            name=serving.model.name, versions=[VERSION], platform="outrider"
        )
        for name, datatype in INPUTS.items():
            answer.inputs.add(name=name, datatype=datatype, shape=[1])
        for name, datatype in OUTPUTS.items():
            answer.outputs.add(name=name, datatype=datatype, shape=[-1])
        return answer.SerializeToString()

    async def _model_infer(self, data: bytes, context: Context) -> bytes:
        readiness, answers = self._readiness, list[oip.ModelInferResponse]()

        async def keep(response: oip.ModelInferResponse) -> None:
            answers.append(response)

        caller = caller_of(grpc_gate.identity(), context, protocol="kserve", method="ModelInfer")
        await readiness.handler.complete(InferRequest(readiness.serving, data, caller, keep))
        return answers[0].SerializeToString()
