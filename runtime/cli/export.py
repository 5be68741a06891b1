"""Commands that need checkpoints: a bundle is made of them, and held against them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.refusals import end_on_sigterm, refusals


def export(
    target: Annotated[
        Path,
        typer.Option(
            help="Checkpoint of the target model: a folder, or organisation/model[@revision] on the Hub."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist.")],
    draft: Annotated[
        Path | None, typer.Option(help="Checkpoint of the draft model, likewise.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="float32, half, float16, bfloat16, int8, w8a8 or int4. Default: float32, or GPTQ's and AWQ's blocks "
            "as the checkpoint has them."
        ),
    ] = None,
    draft_weights: Annotated[str | None, typer.Option(help="Default: as --weights.")] = None,
    max_context: Annotated[int, typer.Option(min=2, help="Tokens of a slot.")] = 1024,
    max_source: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a source, of models with an encoder; default: 512."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Slots.")] = 64,
    max_gamma: Annotated[int, typer.Option(min=0, help="Draft tokens per step.")] = 8,
    max_tree_nodes: Annotated[int, typer.Option(min=0, help="Of a tree; 0: no trees.")] = 64,
) -> None:
    """Turn a checkpoint pair into a bundle."""
    from outrider.runtime.cli.progress import compile_stage

    end_on_sigterm()
    with refusals():
        with compile_stage():
            from outrider.export.pipeline import export_bundle

        export_bundle(
            target=target,
            draft=draft,
            out=out,
            weights=weights,
            draft_weights=draft_weights,
            max_context=max_context,
            max_source=max_source,
            max_batch=max_batch,
            max_gamma=max_gamma,
            max_tree_nodes=max_tree_nodes,
            progress=lambda stage: typer.echo(f"export: {stage}", err=True),
        )


def parity(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    target: Annotated[
        Path, typer.Option(help="Checkpoint it was made from: a folder, or its name on the Hub.")
    ],
    draft: Annotated[Path | None, typer.Option(help="Checkpoint of its draft.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Compare a bundle's graphs with its checkpoints again."""
    import json

    checkpoints = {"target": target} | ({} if draft is None else {"draft": draft})
    with refusals():
        from outrider.engines.bundle.bundle import load_bundle
        from outrider.export.certificate.certify import certify_bundle, verdict
        from outrider.export.hub import locate

        folders = {name: locate(path).path for name, path in checkpoints.items()}
        certificate = certify_bundle(load_bundle(bundle), folders)
        line = verdict(certificate)
    text = json.dumps(certificate, indent=2, sort_keys=True)
    typer.echo(text if as_json else line)
