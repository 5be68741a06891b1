"""What a Ray Serve config file may say of the application, below ``args``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.runtime.core.config import PREFIX_CACHE_BYTES, ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.settings import ServeOptions

# Of ``ServerConfig``, what belongs to a process with ports of its own.
_PORTS = {"max_connections", "lb_delay_s"}
_SERVER = {
    one.name: type(one.default)
    for one in fields(ServerConfig)
    if isinstance(one.default, str | int | float) and one.name not in _PORTS
} | {"default_gamma": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Where replicas find their model, and how many there are.

    Attributes:
        bundle: folder of the bundle, the same on every node.
        device: as of ``outrider serve``.
        model_name: as of ``outrider serve``; empty for the folder's name.
        costs: folder where measured step costs are kept; empty for one by the bundle.
        trusts_tenants: whether ``outrider-tenant`` in metadata is believed: of callers whom nobody has checked.
        min_replicas: replicas that there always are.
        max_replicas: replicas at most.
        target_ongoing_requests: requests of a replica from which on there is another one; 0 for three quarters of its
            slots.
        num_cpus: processors that Ray sets aside for a replica.
        num_gpus: likewise.
    """

    bundle: str
    device: str = "cpu"
    model_name: str = ""
    costs: str = ""
    trusts_tenants: bool = False
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 0.0
    num_cpus: float = 2.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if not self.bundle:
            raise ConfigError("bundle", "must be a folder")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError("min_replicas", "must be at least 1, and at most max_replicas")
        for name in ("target_ongoing_requests", "num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(name, "must be at least 0")


def parse_args(args: Mapping[str, object]) -> tuple[AppOptions, ServeOptions]:
    """Return what ``args`` say: of the application, and of each replica's server.

    Raises:
        ConfigError: a name is unknown, or a value of the wrong kind or out of range.
    """
    kinds = {
        one.name: str if one.name == "bundle" else type(one.default) for one in fields(AppOptions)
    }
    if unknown := set(args) - set(kinds) - set(_SERVER):
        names = ", ".join(sorted({*kinds, *_SERVER}))
        raise ConfigError(sorted(unknown)[0], f"must be one of {names}")
    if "bundle" not in args:
        raise ConfigError("bundle", "is required")
    given = {name: _checked(name, value, (kinds | _SERVER)[name]) for name, value in args.items()}
    options = AppOptions(**{name: given[name] for name in kinds if name in given})
    of_server = {name: given[name] for name in _SERVER if name in given}
    # As ``outrider serve`` has it: without a cache nothing is gained by a replica that has read a prefix.
    config = ServerConfig(**{"prefix_cache_bytes": PREFIX_CACHE_BYTES, **of_server})
    return options, ServeOptions(
        device=options.device,
        model_name=options.model_name or None,
        costs_folder=Path(options.costs) if options.costs else None,
        leaves_drafter="default_drafter" not in given,
        leaves_gamma="default_gamma" not in given,
        config=config,
    )


def _checked(name: str, value: object, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if issubclass(kind, StrEnum):
        if not isinstance(value, str) or value not in [*kind]:
            raise ConfigError(name, f"must be one of {', '.join(kind)}")
        return kind(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(name, f"must be {words[kind]}")
    return value
