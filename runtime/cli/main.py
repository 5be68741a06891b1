"""The ``outrider`` command.

Subcommands import what they need when they run: serving must not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli import chat as cli_chat
from outrider.runtime.cli import client as cli_client
from outrider.runtime.cli import datastore as cli_datastore
from outrider.runtime.cli import distill as cli_distill
from outrider.runtime.cli import export as cli_export
from outrider.runtime.cli import info as cli_info
from outrider.runtime.cli import key as cli_key
from outrider.runtime.cli import offline as cli_offline
from outrider.runtime.cli import signing as cli_signing
from outrider.runtime.cli.entry import version
from outrider.runtime.cli.operate import config as cli_config
from outrider.runtime.cli.operate import health as cli_health
from outrider.runtime.cli.operate import top as cli_top
from outrider.runtime.cli.operate import warm as cli_warm
from outrider.runtime.cli.refusals import EXIT_FAILED, end_on_sigterm, refusals
from outrider.runtime.cli.serve import command as cli_serve
from outrider.runtime.cli.serve.settings import CONTEXT

QUICK_SAMPLES = 200

app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding: export a pair of models, serve it, stream completions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(cli_datastore.datastore)
app.command()(cli_distill.distill)
app.command()(cli_export.export)
app.command()(cli_export.parity)
app.add_typer(cli_key.key)
cli_key.key.command()(cli_signing.new_signer)
app.command()(cli_client.generate)
app.command()(cli_chat.chat)
app.command()(cli_info.info)
app.command()(cli_health.health)
app.command()(cli_offline.analyze)
app.command()(cli_offline.tune)
app.command(context_settings=CONTEXT)(cli_config.config)
app.command(context_settings=CONTEXT)(cli_serve.serve)
app.command(context_settings=CONTEXT)(cli_warm.warm)
app.command()(cli_signing.sign)
app.command()(cli_top.top)
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
    part: Annotated[
        list[str] | None,
        typer.Option(help="target, draft or trees; default: all but trees."),
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="Measured kernel choices; default: the user's cache.")
    ] = None,
) -> None:
    """Build TensorRT plans of a bundle's graphs into the bundle."""
    end_on_sigterm()
    with refusals():
        from outrider.export.exporters import plan_builder
        from outrider.runtime.cli.progress import BuildProgress

        plans = plan_builder()

    options = plans.BuildOptions(
        flavour=flavour,
        compute_capabilities=tuple(compute_capability or ()),
        precision=precision,
        gamma=gamma,
        opt_batch=opt_batch,
        parts=tuple(part or ()),
        timing_cache=timing_cache or Path(typer.get_app_dir("outrider")) / "timing.cache",
    )
    with refusals(), BuildProgress() as progress:
        built = plans.build_plans(bundle, options, report=progress.report)
    for plan in built.manifest.plans:
        size = built.manifest.files[plan.path].size
        typer.echo(f"{plan.path}  {size / 2**20:.1f} MiB")
    cli_signing.say_stale(bundle)


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
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_SAMPLES} samples, one random prompt.")
    ] = False,
) -> None:
    """Prove on this bundle that speculation leaves the target's distribution alone."""
    from outrider.runtime.cli.progress import BuildProgress, compile_stage

    with refusals(), compile_stage():
        from outrider.runtime.offline.prompts import own_prompts
        from outrider.runtime.verify.command import MAX_TOKENS, NUM_PROMPTS, verify

    with refusals(), BuildProgress() as progress:
        progress.say(f"opening {bundle}")
        report = verify(
            bundle,
            num_samples=min(samples, QUICK_SAMPLES) if quick else samples,
            false_alarm=false_alarm,
            seed=seed,
            device=device,
            place=sampler,
            prompts_of=own_prompts(prompt or (), prompts, max_tokens=MAX_TOKENS),
            num_prompts=1 if quick else NUM_PROMPTS,
            report=progress.report,
        )
    typer.echo(report.table())
    raise typer.Exit(0 if report.has_passed else EXIT_FAILED)
