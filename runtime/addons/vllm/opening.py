"""Opens the protocol where its messages are installed."""

from __future__ import annotations

import importlib.util

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.readiness import ServerState, Service


def open_service(readiness: ServerState) -> Service:
    """Return the service.

    Raises:
        ConfigError: its messages are not installed.
    """
    if importlib.util.find_spec("smg_grpc_proto") is None:
        rule = "smg-grpc-proto is not installed: pip install 'outrider-server[vllm-grpc]'"
        raise ConfigError("vllm_grpc", rule)
    from outrider.runtime.addons.vllm.service import VllmEngineService

    return VllmEngineService(readiness)
