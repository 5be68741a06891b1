"""Serves a bundle on a Ray cluster that runs; a program of Ray's own environment, which has no other script's needs."""

from __future__ import annotations

import json
import sys

import ray
from outrider.runtime.addons.ray.app import build_app
from ray import serve
from ray.serve.config import gRPCOptions

SERVICERS = ["outrider.v1.inference_pb2_grpc.add_InferenceServicer_to_server"]


def main(address: str, grpc_port: int, http_port: int, args: str) -> None:
    """Deploy the application with ``args``, JSON, and return once it is ready."""
    ray.init(address=address, log_to_driver=False, logging_level="warning")
    serve.start(
        proxy_location="EveryNode",
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=SERVICERS),
        http_options={"host": "127.0.0.1", "port": http_port},
    )
    serve.run(build_app(json.loads(args)), name="outrider")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
