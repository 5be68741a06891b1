"""``outrider serve``: the run of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import typer
from outrider.runtime.cli.refusals import EXIT_BUG, end_on_sigterm, refusals
from outrider.runtime.cli.serve.parameters import serve_options, with_settings
from outrider.runtime.core.settings import build
from outrider.runtime.serving.settings import LogOptions


@with_settings
def serve(**given: Any) -> None:
    """Serve a bundle over gRPC until SIGTERM."""
    with refusals():
        # The first process of a container has no other way to end, until the event loop has its own.
        end_on_sigterm()
        from outrider.runtime.cli.progress import compile_stage, stage
        from outrider.runtime.serving.observability.logs import Logging, logged_stage

        logs = build(LogOptions, given, {})
    shown = stage if logs.is_for_people else logged_stage
    with closing(Logging(logs)), _bugs_logged(), refusals():
        with compile_stage(shown):
            # What engines of ONNX Runtime compile, else compiled when the bundle is opened.
            from outrider.engines.onnx import packed_loops  # noqa: F401
            from outrider.runtime.serving.process import serve as serve_bundle

        bundle, options = serve_options(given)
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            code = runner.run(serve_bundle(bundle, replace(options, stage=shown)))
    raise typer.Exit(code)


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where it is installed (not on Windows): a message costs a quarter less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@contextmanager
def _bugs_logged() -> Iterator[None]:
    """End the command with a line of the log for an exception that is no refusal."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        logging.getLogger("outrider").critical("uncaught", exc_info=True)
        raise typer.Exit(EXIT_BUG) from error
