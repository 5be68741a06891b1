"""Spans of a server in a process of its own, as a receiver that nobody here wrote has them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from outrider import SyncClient

from scripts.lab.soak.server import running_server
from tests.environments import Environments
from tests.ports import free_ports

TRACE, PARENT = "a" * 32, "b" * 16
RECEIVER = (
    "import logging, sys\n"
    "from oteltest.sink import GrpcSink, PrintHandler\n"
    "sink = GrpcSink(PrintHandler(), logging.getLogger(), port=int(sys.argv[1]))\n"
    "sink.start()\n"
    "print('up', flush=True)\n"
    "sink.wait_for_termination()\n"
)


@pytest.mark.long
def test_a_receiver_of_the_package_index_is_sent_a_request_s_span(
    tiny_bundle: Path, environments: Environments
) -> None:
    python = environments.python("oteltest==0.49.0")
    (port,) = free_ports(1)
    receiver = subprocess.Popen(
        [python, "-c", RECEIVER, str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout is not None and receiver.stdout.readline() == "up\n"
        endpoint = f"http://127.0.0.1:{port}"
        with (
            running_server(tiny_bundle, "--otlp-endpoint", endpoint) as server,
            SyncClient(server.address) as client,
        ):
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            options = {"max_tokens": 3, "ignore_eos": True, "metadata": parent}
            for _ in client.generate("def add", **options):
                pass
        # The server has ended, and sends all that it has before it does.
        found = ast.literal_eval(receiver.stdout.readline())
    finally:
        receiver.kill()
        receiver.communicate()
    (resource,) = found["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    (span,) = scope["spans"]
    names = {one["key"] for one in resource["resource"]["attributes"]}
    values = {one["key"]: one["value"] for one in span["attributes"]}
    assert {"service.name", "service.version"} <= names
    assert span["name"].startswith("text_completion ")
    assert values["gen_ai.usage.output_tokens"] == {"intValue": "3"}
    assert [event["name"] for event in span["events"]][-1] == "first_token"
