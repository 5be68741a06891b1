"""Runs tables of the papers over a bundle: ``python -m scripts.lab.bench.papers BUNDLE --prompts FILE --out DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.lab.bench.papers import leviathan, ouroboros
from scripts.lab.bench.papers.common import Context, Table, run_table
from scripts.tools.common import names_of
from scripts.tools.tables import markdown

TABLES: dict[str, Table] = {**leviathan.TABLES, **ouroboros.TABLES}


def main(
    bundle: Annotated[Path, typer.Argument(help="Exported bundle.")],
    prompts: Annotated[Path, typer.Option(help="As of outrider analyze.")],
    out: Annotated[Path, typer.Option(help="Folder of the rows; those in it are not run again.")],
    only: Annotated[str, typer.Option(help="Tables, comma-separated; default: all.")] = "",
    num_prompts: Annotated[int, typer.Option(help="The first of the file.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Of every answer.")] = 64,
    datastore: Annotated[
        Path | None, typer.Option(help="Corpus of outrider datastore build, for n-gram models.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=0, help="Columns of the draft's window in Ouroboros' rows; default: the paper's."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="0: one per physical core.")] = 0,
) -> None:
    """Print tables in Markdown, each as it ends."""
    context = Context.of(
        bundle, prompts, num_prompts=num_prompts, max_tokens=max_tokens, threads=threads, out=out,
        datastore=datastore, window=window,
    )  # fmt: skip
    try:
        for name in names_of(only, tuple(TABLES)) or TABLES:
            typer.echo(f"\n{name}\n\n{markdown(run_table(context, name, TABLES[name]))}")
    finally:
        context.close()


if __name__ == "__main__":
    typer.run(main)
