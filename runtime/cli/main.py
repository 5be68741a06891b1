"""The ``outrider`` command.

Subcommands import what they need when they run: serving must not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli import chat as cli_chat
from outrider.runtime.cli import client as cli_client
from outrider.runtime.cli import datastore as cli_datastore
from outrider.runtime.cli import export as cli_export
from outrider.runtime.cli import offline as cli_offline
from outrider.runtime.cli import signing as cli_signing
from outrider.runtime.cli.entry import version
from outrider.runtime.cli.refusals import EXIT_FAILED, end_on_sigterm, refusals
from outrider.runtime.core.config import MOST_COUNT, PREFIX_CACHE_BYTES
from outrider.runtime.core.drafting import (
    AUTO_DRAFTERS,
    DraftingConfig,
    HistoryScope,
    parse_settings,
)
from outrider.runtime.core.errors import ConfigError

app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding: export a pair of models, serve it, stream completions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(cli_datastore.datastore)
app.command()(cli_export.export)
app.command()(cli_export.parity)
app.command()(cli_client.generate)
app.command()(cli_chat.chat)
app.command()(cli_client.info)
app.command()(cli_offline.analyze)
app.command()(cli_offline.tune)
app.command()(cli_signing.sign)
app.command()(cli_signing.verify)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"outrider {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


@app.command()
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle to build plans into.")],
    flavour: Annotated[
        str | None, typer.Option(help="tensorrt or rtx; default: installed.")
    ] = None,
    compute_capability: Annotated[
        list[str] | None, typer.Option(help="GPU to build for, such as 8.0; default: the GPU here.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float16, bfloat16, float32 or float8.")
    ] = "float16",
    gamma: Annotated[int, typer.Option(min=0, help="Draft tokens per step to tune for.")] = 4,
    opt_batch: Annotated[int, typer.Option(min=1, help="Rows to tune for.")] = 8,
    capacity: Annotated[
        list[int] | None, typer.Option(help="Cache capacities beside the largest; a plan each.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="target, draft, sampler or trees; default: all but trees."),
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="Measured kernel choices; default: the user's cache.")
    ] = None,
) -> None:
    """Build TensorRT plans of a bundle's graphs into the bundle."""
    end_on_sigterm()
    with refusals():
        from outrider.export.tensorrt.build import BuildOptions, build_plans
        from outrider.runtime.cli.progress import BuildProgress

    options = BuildOptions(
        flavour=flavour,
        compute_capabilities=tuple(compute_capability or ()),
        precision=precision,
        gamma=gamma,
        opt_batch=opt_batch,
        capacities=tuple(capacity or ()),
        parts=tuple(part or ()),
        timing_cache=timing_cache or Path(typer.get_app_dir("outrider")) / "timing.cache",
    )
    with refusals(), BuildProgress() as progress:
        built = build_plans(bundle, options, report=progress.report)
    for plan in built.manifest.plans:
        size = built.manifest.files[plan.path].size
        typer.echo(f"{plan.path}  {size / 2**20:.1f} MiB")
    cli_signing.say_stale(bundle)


@app.command()
def serve(
    bundle: Annotated[Path, typer.Argument(help="Bundle to serve.")],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 50051,
    port_file: Annotated[Path | None, typer.Option(help="Written with the bound port.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Prometheus on the loopback.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda[:N], tensorrt[:N] or auto.")] = "auto",
    model_name: Annotated[str | None, typer.Option(help="Default: the folder's name.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests that hold a slot.")] = 64,
    max_queued: Annotated[int, typer.Option(help="Requests that wait for one.")] = 256,
    max_connections: Annotated[int, typer.Option(help="Of clients, at once.")] = 512,
    queue_timeout_s: Annotated[float, typer.Option(help="Longest wait, seconds.")] = 30.0,
    gamma: Annotated[
        str | None,
        typer.Option(help="Draft tokens per step, or auto: what gains most. Default: as tuned."),
    ] = None,
    block_verification: Annotated[
        bool, typer.Option(help="Judge sampled drafts of max_accept as whole blocks.")
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(help="Folder for measured step costs; default: by the bundle.")
    ] = None,
    refresh_costs: Annotated[bool, typer.Option(help="Measure step costs anew.")] = False,
    drafter: Annotated[
        str | None,
        typer.Option(help="Name (see outrider info), or auto. Default: as tuned, or model."),
    ] = None,
    auto_drafters: Annotated[
        str, typer.Option(help="Names that drafter auto chooses among by speed, favourite first.")
    ] = ",".join(AUTO_DRAFTERS),
    datastore: Annotated[
        Path | None, typer.Option(help="Corpus made by outrider datastore build.")
    ] = None,
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            "--history-scope",
            help="Whose earlier answers a request may profit from: request, tenant or server.",
        ),
    ] = "tenant",
    drafting: Annotated[
        list[str] | None,
        typer.Option(help="Setting of the drafters, NAME=VALUE; repeat for several."),
    ] = None,
    prefix_cache_bytes: Annotated[
        int, typer.Option(help="Memory for caches of earlier prompts and answers; 0: none.")
    ] = PREFIX_CACHE_BYTES,
    prefix_cache_scope: Annotated[
        str, typer.Option(help="Whose prompts and answers a request may find: tenant or server.")
    ] = "tenant",
    drain_timeout_s: Annotated[float, typer.Option(help="For running requests.")] = 30.0,
    hang_s: Annotated[
        float, typer.Option(help="A step of at least this and 20 usual ones ends the process.")
    ] = 10.0,
    lb_delay_s: Annotated[float, typer.Option(help="For load balancers to notice.")] = 5.0,
    message_interval_s: Annotated[
        float, typer.Option(help="Between two messages of a stream, where steps are short.")
    ] = 0.05,
    threads: Annotated[int, typer.Option(help="Threads of a CPU backend.")] = 2,
    sampler: Annotated[
        str, typer.Option(help="Where drafts are judged: auto, host or device.")
    ] = "auto",
    provider_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for ONNX Runtime's CUDA provider.")
    ] = None,
    generation_defaults: Annotated[
        bool,
        typer.Option(
            help="Give requests the checkpoint's generation_config for what they leave open."
        ),
    ] = False,
    isolate_engine: Annotated[
        bool, typer.Option(help="Engines in a process of their own, started again where it ends.")
    ] = False,
) -> None:
    """Serve a bundle over gRPC until SIGTERM."""
    from outrider.runtime.cli.progress import compile_stage, stage

    with refusals(), compile_stage():
        # What engines of ONNX Runtime compile, else compiled when the bundle is opened.
        from outrider.engines.onnx import packed_loops  # noqa: F401
        from outrider.runtime.core.config import ServerConfig
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
        options = ServeOptions(
            address=f"{host}:{port}",
            port_file=port_file,
            metrics_port=metrics_port,
            costs_folder=costs,
            isolates_engine=isolate_engine,
            refreshes_costs=refresh_costs,
            device=device,
            model_name=model_name,
            leaves_drafter=drafter is None,
            leaves_gamma=gamma is None,
            applies_generation_defaults=generation_defaults,
            stage=stage,
            config=config,
        )
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            code = runner.run(serve_bundle(bundle, options))
    raise typer.Exit(code)


@app.command("verify-sampler")
def verify_sampler(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    samples: Annotated[int, typer.Option(min=200, help="Completions per side.")] = 2000,
    false_alarm: Annotated[float, typer.Option(help="Chance to fail a correct bundle.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="First of the seeds used.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda[:N], tensorrt[:N] or auto.")] = "cpu",
    sampler: Annotated[str, typer.Option(help="The one to prove: auto, host or device.")] = "auto",
    prompt: Annotated[list[str] | None, typer.Option(help="Of your own; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of them, one per line.")] = None,
) -> None:
    """Prove on this bundle that speculation leaves the target's distribution alone."""
    from outrider.runtime.cli.progress import compile_stage

    with refusals(), compile_stage():
        from outrider.runtime.offline.prompts import own_prompts
        from outrider.runtime.verify.command import MAX_TOKENS, verify

    with refusals():
        report = verify(
            bundle,
            num_samples=samples,
            false_alarm=false_alarm,
            seed=seed,
            device=device,
            place=sampler,
            prompts_of=own_prompts(prompt or (), prompts, max_tokens=MAX_TOKENS),
        )
    typer.echo(report.table())
    raise typer.Exit(0 if report.has_passed else EXIT_FAILED)


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
