"""``outrider serve``: what a server is made of, and its run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from outrider.runtime.cli.refusals import end_on_sigterm, refusals
from outrider.runtime.cli.serve import addresses as places
from outrider.runtime.cli.serve import drafting as drafts
from outrider.runtime.cli.serve import engines, limits, observability, protocols, security, settings
from outrider.runtime.core.config import PREFIX_CACHE_BYTES
from outrider.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.runtime.serving.factory import ServeOptions
else:
    ServeOptions = Any  # typer evaluates annotations, and the real one takes seconds to import

Bundle = Annotated[
    Path | None, typer.Argument(help="Bundle to serve.", envvar="OUTRIDER_SERVE_BUNDLE")
]
ModelName = Annotated[str | None, typer.Option(help="Default: the folder's name.")]
GenerationDefaults = Annotated[
    bool,
    typer.Option(help="Give requests the checkpoint's generation_config for what they leave open."),
]


def what_to_serve(
    bundle: Bundle = None,
    config: settings.ConfigFile = None,
    model_name: ModelName = None,
    generation_defaults: GenerationDefaults = False,
    host: places.Host = None,
    port: places.Port = None,
    uds: places.Uds = None,
    port_file: places.PortFile = None,
    http_port: places.HttpPort = None,
    http_address: places.HttpAddress = None,
    http_port_file: places.HttpPortFile = None,
    insecure: places.Insecure = False,
    kserve: protocols.Kserve = False,
    vllm_grpc: protocols.VllmGrpc = False,
    trusted_signers: security.TrustedSigners = None,
    tls_certificate: security.TlsCertificate = None,
    tls_key: security.TlsKey = None,
    tls_client_ca: security.TlsClientCa = None,
    keys: security.Keys = None,
    jwt_keys: security.JwtKeys = None,
    jwt_audience: security.JwtAudience = None,
    jwt_tenant_claim: security.JwtTenantClaim = "sub",
    tenants: security.Tenants = None,
    open_health: security.OpenHealth = True,
    audit_log: security.AuditLog = None,
    reload_every_s: security.ReloadEveryS = 10.0,
    max_running: limits.MaxRunning = 64,
    max_context: limits.MaxContext = None,
    max_queued: limits.MaxQueued = 256,
    max_connections: limits.MaxConnections = 512,
    queue_timeout_s: limits.QueueTimeoutS = 30.0,
    drain_timeout_s: limits.DrainTimeoutS = 30.0,
    hang_s: limits.HangS = 10.0,
    lb_delay_s: limits.LbDelayS = 5.0,
    message_interval_s: limits.MessageIntervalS = 0.05,
    limit: limits.Limit = None,
    device: engines.Device = "auto",
    threads: engines.Threads = 2,
    sampler: engines.Sampler = "auto",
    provider_option: engines.ProviderOption = None,
    isolate_engine: engines.IsolateEngine = False,
    gamma: drafts.Gamma = None,
    block_verification: drafts.BlockVerification = False,
    costs: drafts.Costs = None,
    refresh_costs: drafts.RefreshCosts = False,
    drafter: drafts.Drafter = None,
    auto_drafters: drafts.AutoDrafters = drafts.ALL_AUTO,
    datastore: drafts.Datastore = None,
    scope: drafts.Scope = "tenant",
    drafting: drafts.Drafting = None,
    prefix_cache_bytes: drafts.PrefixCacheBytes = PREFIX_CACHE_BYTES,
    prefix_cache_scope: drafts.PrefixCacheScope = "tenant",
    metrics_port: observability.MetricsPort = None,
    metrics_address: observability.MetricsAddress = None,
    vllm_metric_names: observability.VllmMetricNames = False,
    log_format: observability.LogFormat = "console",
    log_level: observability.LogLevel = "info",
    access_log: observability.AccessLog = True,
    otlp_endpoint: observability.OtlpEndpoint = None,
) -> tuple[Path, ServeOptions]:
    """Return the bundle and how to serve it, as the options of the command line say.

    Raises:
        ConfigError: an option is out of range.
        BundleError: a file of signers' keys cannot be used.
    """
    from outrider.engines.bundle.signatures import read_signers
    from outrider.runtime.cli.progress import stage
    from outrider.runtime.core.config import ServerConfig
    from outrider.runtime.serving.factory import ServeOptions
    from outrider.runtime.serving.observability.logs import logged_stage
    from outrider.runtime.serving.observability.options import WatchOptions
    from outrider.runtime.serving.security.options import SecurityOptions

    if bundle is None:
        raise ConfigError(
            "bundle", f"must be given, or {settings.PREFIX}_BUNDLE, or bundle in --config"
        )
    of_server, of_requests = limits.parse_limits(limit or ())
    server_config = ServerConfig(
        max_running=max_running,
        max_queued=max_queued,
        max_connections=max_connections,
        queue_timeout_s=queue_timeout_s,
        default_gamma=drafts.default_gamma(gamma or "auto"),
        block_verification=block_verification,
        default_drafter="model" if drafter is None else drafter,
        auto_drafters=tuple(auto_drafters.split(",")),
        drain_timeout_s=drain_timeout_s,
        hang_s=hang_s,
        lb_delay_s=lb_delay_s,
        message_interval_s=message_interval_s,
        num_threads=threads,
        sampler=sampler,
        provider_options=engines.pairs(provider_option or ()),
        prefix_cache_bytes=prefix_cache_bytes,
        prefix_cache_scope=drafts.history_scope("prefix_cache_scope", prefix_cache_scope),
        drafting=drafts.drafting_config(datastore, scope, drafting or []),
        **of_server,
    )
    addresses = places.addresses(host, port, uds)
    logs = observability.log_options(log_format, log_level, access_log)
    return bundle, ServeOptions(
        address=addresses[0],
        socket_path=uds if len(addresses) > 1 else None,
        port_file=port_file,
        http_address=places.one_address("http", http_port, http_address),
        http_port_file=http_port_file,
        watch=WatchOptions(
            metrics_address=places.one_address("metrics", metrics_port, metrics_address),
            has_vllm_names=vllm_metric_names,
            logs=logs,
            otlp_endpoint=otlp_endpoint,
        ),
        security=SecurityOptions(
            keys=keys,
            jwt_keys=jwt_keys,
            jwt_audience=jwt_audience,
            jwt_tenant_claim=jwt_tenant_claim,
            tenants=tenants,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            is_insecure=insecure,
            has_open_health=open_health,
            reload_every_s=reload_every_s,
        ),
        audit_log=audit_log,
        costs_folder=costs,
        isolates_engine=isolate_engine,
        refreshes_costs=refresh_costs,
        device=device,
        model_name=model_name,
        leaves_drafter=drafter is None,
        leaves_gamma=gamma is None,
        trusted_signers=() if trusted_signers is None else read_signers(trusted_signers),
        max_context=max_context,
        applies_generation_defaults=generation_defaults,
        has_kserve=kserve,
        has_vllm_grpc=vllm_grpc,
        stage=stage if logs.is_for_people else logged_stage,
        config=server_config,
        limits=of_requests,
    )


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of serve behind its own; it gets their values as keyword arguments."""
    own = inspect.signature(command, eval_str=True)
    of_serve = inspect.signature(what_to_serve, eval_str=True).parameters.values()
    for one in of_serve:
        for option in one.annotation.__metadata__:
            # In short in the page instead.
            option.show_envvar = False
    fixed = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*fixed, *of_serve])  # type: ignore[attr-defined]
    return command


@with_settings
def serve(**given: Any) -> None:
    """Serve a bundle over gRPC until SIGTERM."""
    with refusals():
        # The first process of a container has no other way to end, until the event loop has its own.
        end_on_sigterm()
        from outrider.runtime.cli.progress import compile_stage, stage
        from outrider.runtime.serving.observability.logs import Logging, logged_stage

        logs = observability.log_options(
            *(given[one] for one in ("log_format", "log_level", "access_log"))
        )
    with closing(Logging(logs)), observability.bugs_logged(), refusals():
        with compile_stage(stage if logs.is_for_people else logged_stage):
            # What engines of ONNX Runtime compile, else compiled when the bundle is opened.
            from outrider.engines.onnx import packed_loops  # noqa: F401
            from outrider.runtime.serving.process import serve as serve_bundle

        bundle, options = what_to_serve(**given)
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            code = runner.run(serve_bundle(bundle, options))
    raise typer.Exit(code)


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where it is installed (not on Windows): a message costs a quarter less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
