"""Commands that need checkpoints: a bundle is made of them, and held against them."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from outrider.runtime.cli.refusals import end_on_sigterm, refusals

if TYPE_CHECKING:
    from outrider.engines.bundle.bundle import Bundle


def export(
    target: Annotated[
        Path,
        typer.Option(
            help="Checkpoint of the target model: a folder, a GGUF file, or organisation/model[@revision] on the Hub."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist.")],
    draft: Annotated[
        Path | None, typer.Option(help="Checkpoint of the draft model, likewise.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="float32, half, float16, bfloat16, int8, w8a8 or int4. Default: float32, or the blocks of GPTQ, AWQ "
            "and GGUF as the checkpoint has them."
        ),
    ] = None,
    draft_weights: Annotated[str | None, typer.Option(help="Default: as --weights.")] = None,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a slot. Default: the model's own."),
    ] = None,
    max_source: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a source, of models with an encoder; default: 512."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Slots.")] = 64,
    max_gamma: Annotated[int, typer.Option(min=0, help="Draft tokens per step.")] = 8,
    max_tree_nodes: Annotated[int, typer.Option(min=0, help="Of a tree; 0: no trees.")] = 64,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="Text that int8, int4 and w8a8 are rounded by. Default: text the model writes."
        ),
    ] = None,
    accept_parity: Annotated[
        float | None,
        typer.Option(
            help="How far float32 logits may be from PyTorch's; recorded. Default: as rounding explains."
        ),
    ] = None,
) -> None:
    """Turn a checkpoint pair into a bundle."""
    from outrider.runtime.cli.progress import ExportProgress, compile_stage

    end_on_sigterm()
    with refusals(), ExportProgress() as progress:
        with compile_stage():
            from outrider.export.pipeline import ExportOptions, export_bundle

        made = export_bundle(
            target=target,
            draft=draft,
            out=out,
            options=ExportOptions(
                weights=weights,
                draft_weights=draft_weights,
                max_context=max_context,
                max_source=max_source,
                max_batch=max_batch,
                max_gamma=max_gamma,
                max_tree_nodes=max_tree_nodes,
                calibration_text=calibration_text,
                accept_parity=accept_parity,
            ),
            progress=progress.stage,
            report=progress.report,
        )
    _summarise(out, made)


def _summarise(out: Path, bundle: Bundle) -> None:
    """Say what an export made, how near it is to its checkpoints, and what to do with it."""
    from outrider.export.certificate.certify import verdict

    manifest = bundle.manifest
    size = sum(entry.size for entry in manifest.files.values())
    kinds = [one.weights for one in (manifest.target, manifest.draft) if one is not None]
    typer.echo(
        f"{out}: {size / 2**20:.1f} MiB in {len(manifest.files)} files, weights {' and '.join(kinds)}, "
        f"context {manifest.max_context}, {manifest.max_batch} slots"
    )
    parts = {name: one for name, one in manifest.certificate.items() if isinstance(one, Mapping)}
    typer.echo(verdict(parts))
    if accepted := manifest.accepted_words():
        typer.echo(accepted)
    typer.echo(f"next: outrider serve {shlex.quote(str(out))}")


def parity(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    target: Annotated[
        Path,
        typer.Option(
            help="Checkpoint it was made from: a folder, a GGUF file, or a name on the Hub."
        ),
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
        from outrider.export.progress import Progress
        from outrider.export.sources import located

        scratch = Path(tempfile.gettempdir())
        with located(checkpoints, scratch, Progress(lambda _: None)) as found:
            folders = {name: one.path for name, one in found.items()}
            certificate = certify_bundle(load_bundle(bundle), folders)
        line = verdict(certificate)
    text = json.dumps(certificate, indent=2, sort_keys=True)
    typer.echo(text if as_json else line)
