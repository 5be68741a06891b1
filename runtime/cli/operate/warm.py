"""``outrider warm``: what a first start takes long for, done ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import typer
from outrider.runtime.cli.refusals import EXIT_FAILED, end_on_sigterm, refusals
from outrider.runtime.cli.serve.parameters import serve_options, with_settings

STARTS = 2
"""The first does what is left to do, the second shows that nothing is."""


@with_settings
def warm(**given: Any) -> None:
    """Compile loops and measure step costs for a later outrider serve of the same settings and machine, and end."""
    from outrider.runtime.cli.progress import compile_stage, stage

    end_on_sigterm()
    with refusals(), compile_stage():
        from outrider.engines.onnx import packed_loops  # noqa: F401
        from outrider.runtime.serving.factory import load_model
        from outrider.runtime.serving.process import serve  # noqa: F401

    stages: list[str] = []

    @contextmanager
    def noted(text: str) -> Iterator[None]:
        stages.append(text)
        with stage(text):
            yield

    with refusals():
        bundle, options = serve_options(given)
        for _ in range(STARTS):
            stages.clear()
            load_model(bundle, replace(options, stage=noted)).close()
            options = replace(options, refreshes_costs=False)
            if not stages:
                typer.echo(f"{bundle}: a start with these settings measures nothing")
                return
    typer.echo(f"outrider: a start still begins with {', '.join(stages)}", err=True)
    raise typer.Exit(EXIT_FAILED)
