"""``outrider serve``: its options, and what a server is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.refusals import refusals
from outrider.runtime.core.config import MOST_COUNT, PREFIX_CACHE_BYTES
from outrider.runtime.core.drafting import (
    AUTO_DRAFTERS,
    DraftingConfig,
    HistoryScope,
    parse_settings,
)
from outrider.runtime.core.errors import ConfigError

# Headings of the options in --help.
ADDRESSES = "Addresses"
DOORS = "Who is let in"
DIALECTS = "Protocols beside outrider.v1"
LIMITS = "Limits and waits"
ENGINES = "Engines"
DRAFTING = "Drafting and caches"


def serve(
    bundle: Annotated[Path, typer.Argument(help="Bundle to serve.")],
    trusted_signers: Annotated[
        Path | None,
        typer.Option(
            help="Public keys, PEM: one of them must have signed the bundle (outrider sign).",
            rich_help_panel=DOORS,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Interface to listen on; other than the loopback's with TLS only. Default: 127.0.0.1.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="0 takes a free one. Default: 50051.", rich_help_panel=ADDRESSES
        ),
    ] = None,
    uds: Annotated[
        Path | None,
        typer.Option(
            help="Unix socket to listen on; without --host and --port nothing else is.",
            rich_help_panel=ADDRESSES,
        ),
    ] = None,
    port_file: Annotated[
        Path | None, typer.Option(help="Written with the bound port.", rich_help_panel=ADDRESSES)
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Prometheus on the loopback.", rich_help_panel=ADDRESSES
        ),
    ] = None,
    metrics_address: Annotated[
        str | None,
        typer.Option(help="Prometheus on HOST:PORT or unix:PATH.", rich_help_panel=ADDRESSES),
    ] = None,
    kserve: Annotated[
        bool,
        typer.Option(
            "--kserve",
            help="Speak KServe's and Triton's Open Inference Protocol on the port, too.",
            rich_help_panel=DIALECTS,
        ),
    ] = False,
    vllm_grpc: Annotated[
        bool,
        typer.Option(
            "--vllm-grpc",
            help="Speak the gRPC of vLLM's engine on the port, too: for the gateway smg.",
            rich_help_panel=DIALECTS,
        ),
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen for other machines without TLS.", rich_help_panel=ADDRESSES
        ),
    ] = False,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Of the server, PEM.", rich_help_panel=DOORS)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Of the certificate, PEM.", rich_help_panel=DOORS)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Clients need a certificate by these, PEM.", rich_help_panel=DOORS),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Hashes of API keys (outrider key new).", rich_help_panel=DOORS),
    ] = None,
    jwt_keys: Annotated[
        Path | None,
        typer.Option(help="JSON web key set of who signs tokens.", rich_help_panel=DOORS),
    ] = None,
    jwt_audience: Annotated[
        str | None, typer.Option(help="That tokens must be for.", rich_help_panel=DOORS)
    ] = None,
    jwt_tenant_claim: Annotated[
        str, typer.Option(help="Claim of tokens that is the tenant.", rich_help_panel=DOORS)
    ] = "sub",
    tenants: Annotated[
        Path | None,
        typer.Option(help="Shares and certificates of tenants, TOML.", rich_help_panel=DOORS),
    ] = None,
    open_health: Annotated[
        bool,
        typer.Option(help="Tell health to callers without credentials.", rich_help_panel=DOORS),
    ] = True,
    audit_log: Annotated[
        Path | None,
        typer.Option(help="File that gets a line of JSON per request.", rich_help_panel=DOORS),
    ] = None,
    reload_every_s: Annotated[
        float, typer.Option(help="Between two looks at these files.", rich_help_panel=DOORS)
    ] = 10.0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda[:N], tensorrt[:N] or auto.", rich_help_panel=ENGINES)
    ] = "auto",
    model_name: Annotated[str | None, typer.Option(help="Default: the folder's name.")] = None,
    max_running: Annotated[
        int, typer.Option(help="Requests that hold a slot.", rich_help_panel=LIMITS)
    ] = 64,
    max_queued: Annotated[
        int, typer.Option(help="Requests that wait for one.", rich_help_panel=LIMITS)
    ] = 256,
    max_connections: Annotated[
        int, typer.Option(help="Of clients, at once.", rich_help_panel=LIMITS)
    ] = 512,
    queue_timeout_s: Annotated[
        float, typer.Option(help="Longest wait, seconds.", rich_help_panel=LIMITS)
    ] = 30.0,
    gamma: Annotated[
        str | None,
        typer.Option(
            help="Draft tokens per step, or auto: what gains most. Default: as tuned.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    block_verification: Annotated[
        bool,
        typer.Option(
            help="Judge sampled drafts of max_accept as whole blocks.", rich_help_panel=DRAFTING
        ),
    ] = False,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for measured step costs; default: by the bundle.", rich_help_panel=DRAFTING
        ),
    ] = None,
    refresh_costs: Annotated[
        bool, typer.Option(help="Measure step costs anew.", rich_help_panel=DRAFTING)
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Name (see outrider info), or auto. Default: as tuned, or model.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    auto_drafters: Annotated[
        str,
        typer.Option(
            help="Names that drafter auto chooses among by speed, favourite first.",
            rich_help_panel=DRAFTING,
        ),
    ] = ",".join(AUTO_DRAFTERS),
    datastore: Annotated[
        Path | None,
        typer.Option(help="Corpus made by outrider datastore build.", rich_help_panel=DRAFTING),
    ] = None,
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            "--history-scope",
            help="Whose earlier answers a request may profit from: request, tenant or server.",
            rich_help_panel=DRAFTING,
        ),
    ] = "tenant",
    drafting: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting of the drafters, NAME=VALUE; repeat for several.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    prefix_cache_bytes: Annotated[
        int,
        typer.Option(
            help="Memory for caches of earlier prompts and answers; 0: none.",
            rich_help_panel=DRAFTING,
        ),
    ] = PREFIX_CACHE_BYTES,
    prefix_cache_scope: Annotated[
        str,
        typer.Option(
            help="Whose prompts and answers a request may find: tenant or server.",
            rich_help_panel=DRAFTING,
        ),
    ] = "tenant",
    drain_timeout_s: Annotated[
        float, typer.Option(help="For running requests.", rich_help_panel=LIMITS)
    ] = 30.0,
    hang_s: Annotated[
        float,
        typer.Option(
            help="A step of at least this and 20 usual ones ends the process.",
            rich_help_panel=LIMITS,
        ),
    ] = 10.0,
    lb_delay_s: Annotated[
        float, typer.Option(help="For load balancers to notice.", rich_help_panel=LIMITS)
    ] = 5.0,
    message_interval_s: Annotated[
        float,
        typer.Option(
            help="Between two messages of a stream, where steps are short.", rich_help_panel=LIMITS
        ),
    ] = 0.05,
    threads: Annotated[
        int, typer.Option(help="Threads of a CPU backend.", rich_help_panel=ENGINES)
    ] = 2,
    sampler: Annotated[
        str,
        typer.Option(
            help="Where drafts are judged: auto, host or device.", rich_help_panel=ENGINES
        ),
    ] = "auto",
    provider_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for ONNX Runtime's CUDA provider.", rich_help_panel=ENGINES),
    ] = None,
    generation_defaults: Annotated[
        bool,
        typer.Option(
            help="Give requests the checkpoint's generation_config for what they leave open."
        ),
    ] = False,
    isolate_engine: Annotated[
        bool,
        typer.Option(
            help="Engines in a process of their own, started again where it ends.",
            rich_help_panel=ENGINES,
        ),
    ] = False,
) -> None:
    """Serve a bundle over gRPC until SIGTERM."""
    from outrider.runtime.cli.progress import compile_stage, stage

    with refusals(), compile_stage():
        from outrider.engines.bundle.signatures import read_signers

        # What engines of ONNX Runtime compile, else compiled when the bundle is opened.
        from outrider.engines.onnx import packed_loops  # noqa: F401
        from outrider.runtime.core.config import ServerConfig
        from outrider.runtime.serving.doors.options import DoorOptions
        from outrider.runtime.serving.opening import ServeOptions
        from outrider.runtime.serving.server import serve as serve_bundle

    with refusals():
        config = ServerConfig(
            max_running=max_running,
            max_queued=max_queued,
            max_connections=max_connections,
            queue_timeout_s=queue_timeout_s,
            default_gamma=_gamma(gamma or "auto"),
            block_verification=block_verification,
            default_drafter="model" if drafter is None else drafter,
            auto_drafters=tuple(auto_drafters.split(",")),
            drain_timeout_s=drain_timeout_s,
            hang_s=hang_s,
            lb_delay_s=lb_delay_s,
            message_interval_s=message_interval_s,
            num_threads=threads,
            sampler=sampler,
            provider_options=_pairs(provider_option or ()),
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache_scope=_scope("prefix_cache_scope", prefix_cache_scope),
            drafting=_drafting(datastore, scope, drafting or []),
        )
        addresses = _addresses(host, port, uds)
        doors = DoorOptions(
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
        )
        options = ServeOptions(
            address=addresses[0],
            socket_path=uds if len(addresses) > 1 else None,
            port_file=port_file,
            metrics_address=_metrics_address(metrics_port, metrics_address),
            doors=doors,
            audit_log=audit_log,
            costs_folder=costs,
            isolates_engine=isolate_engine,
            refreshes_costs=refresh_costs,
            device=device,
            model_name=model_name,
            leaves_drafter=drafter is None,
            leaves_gamma=gamma is None,
            trusted_signers=() if trusted_signers is None else read_signers(trusted_signers),
            applies_generation_defaults=generation_defaults,
            has_kserve=kserve,
            has_vllm_grpc=vllm_grpc,
            stage=stage,
            config=config,
        )
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            code = runner.run(serve_bundle(bundle, options))
    raise typer.Exit(code)


def _addresses(host: str | None, port: int | None, uds: Path | None) -> list[str]:
    """Return the addresses that were asked for, the one of TCP first."""
    from outrider.runtime.serving.doors.addresses import UNIX, tcp_address

    addresses = []
    if uds is None or host is not None or port is not None:
        addresses.append(tcp_address(host or "127.0.0.1", 50051 if port is None else port))
    return addresses + ([] if uds is None else [f"{UNIX}{uds}"])


def _metrics_address(port: int | None, address: str | None) -> str | None:
    if port is not None and address is not None:
        raise ConfigError("metrics_port", "must be left out where metrics_address is given")
    return address if port is None else f"127.0.0.1:{port}"


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where it is installed (not on Windows): a message costs a quarter less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _gamma(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_COUNT)):
        raise ConfigError("gamma", f"must be auto or a number of at most {MOST_COUNT}")
    return int(text)


def _pairs(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return keys and values of texts such as "a=b"; one without a key or "=" has an empty key."""
    parts = [text.partition("=") for text in texts]
    return tuple((key.strip() if sign else "", value.strip()) for key, sign, value in parts)


def _scope(key: str, scope: str) -> HistoryScope:
    if scope not in set(HistoryScope):
        raise ConfigError(key, f"must be one of {', '.join(HistoryScope)}")
    return HistoryScope(scope)


def _drafting(datastore: Path | None, scope: str, settings: Sequence[str]) -> DraftingConfig:
    return DraftingConfig(
        datastore="" if datastore is None else str(datastore),
        history_scope=_scope("scope", scope),
        **parse_settings(settings),  # type: ignore[arg-type]
    )
