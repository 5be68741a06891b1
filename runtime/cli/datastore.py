"""``outrider datastore``: corpora for the drafters that retrieve and count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from outrider.runtime.cli.refusals import end_on_sigterm, refusals

datastore = typer.Typer(name="datastore", help="Corpora for drafting.", no_args_is_help=True)


@datastore.callback()
def group() -> None:
    """Corpora for drafting."""


@datastore.command()
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle whose tokenizer reads the texts.")],
    texts: Annotated[list[Path], typer.Argument(help="UTF-8 files, or folders searched for them.")],
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist.")],
    suffix: Annotated[str, typer.Option(help="Of files taken from folders.")] = ".txt",
) -> None:
    """Sort all suffixes of texts, for serve --datastore."""
    end_on_sigterm()
    with refusals():
        from outrider.engines.bundle.bundle import load_bundle
        from outrider.engines.bundle.names import TOKENIZER_FILE
        from outrider.runtime.drafters.text.suffix_array import write_datastore
        from outrider.runtime.serving.tokenizer import TokenizersCodec

        loaded = load_bundle(bundle)
        vocab_size = loaded.manifest.target.vocab_size
        codec = TokenizersCodec(loaded.read(TOKENIZER_FILE))
        files = [
            file
            for path in texts
            for file in (sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path])
        ]
        tokens = [
            codec.encode(file.read_text(encoding="utf-8", errors="replace"), False)
            for file in files
        ]
        num_tokens = write_datastore(tokens, out, vocab_size=vocab_size)
    typer.echo(f"{len(files)} texts, {num_tokens} tokens")
