"""A collector of OTLP over gRPC that keeps what it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


class Collector(service.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[messages.ExportTraceServiceRequest] = []
        self.url = ""

    def Export(self, request, context):
        self.requests.append(request)
        return messages.ExportTraceServiceResponse()

    @property
    def spans(self) -> list:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
