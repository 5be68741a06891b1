"""The protocols that a server speaks beside ``outrider.v1``: each is off unless it is asked for."""

from __future__ import annotations

import importlib.util

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.kserve.service import OpenInferenceService
from outrider.runtime.serving.readiness import ServerState, Service
from outrider.runtime.serving.settings import ServeOptions


def services_of(options: ServeOptions, readiness: ServerState) -> tuple[Service, ...]:
    """Return the protocols of gRPC that are asked for.

    Raises:
        ConfigError: the library of one is not installed.
    """
    services: list[Service] = []
    if options.has_kserve:
        services.append(OpenInferenceService(readiness))
    if options.has_vllm_grpc:
        if importlib.util.find_spec("smg_grpc_proto") is None:
            rule = "smg-grpc-proto is not installed: pip install 'outrider-server[vllm-grpc]'"
            raise ConfigError("vllm_grpc", rule)
        from outrider.runtime.serving.vllm.service import VllmEngineService

        services.append(VllmEngineService(readiness))
    return tuple(services)
