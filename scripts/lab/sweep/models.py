"""Every causal-LM architecture of Transformers as a tiny random model: exported with parity, or refused by name.

One process each, with a limit of time and memory; one line of JSON each in ``scripts/lab/sweep/architectures.jsonl``.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import typer
from outrider.export.text_part import text_part
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from scripts.lab.sweep.cell import try_architecture
from scripts.lab.sweep.record import BROKEN, RECORD, Outcome, read_record, write_record
from scripts.lab.sweep.table import reads_images, write_table

_TIME_LIMIT_S = 300
_MEMORY_BYTES = 12 << 30


def architectures() -> list[str]:
    """Return the names of all causal-LM architectures that Transformers knows, and of models with a text part."""
    others = filter(reads_images, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    wholes = [name for name in others if text_part(CONFIG_MAPPING[name]()) is not None]
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *wholes])


def in_a_process(
    name: str,
    attempt: Callable[[str], Outcome] = try_architecture,
    time_limit_s: float = _TIME_LIMIT_S,
) -> Outcome:
    """Return what comes of an architecture, by an attempt in a process that may die or never end."""
    # A fork: what is imported here need not be imported again.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, attempt, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit_s):
            return Outcome(name=name, outcome=BROKEN, reason=f"not done in {time_limit_s} s")
        found: Outcome = receiver.recv()
        return found
    except EOFError:
        process.join()
        return Outcome(name=name, outcome=BROKEN, reason=f"died with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _child(name: str, attempt: Callable[[str], Outcome], sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    sender.send(attempt(name))


def main(
    only: Annotated[list[str] | None, typer.Option(help="Architectures to try again.")] = None,
    missing: Annotated[bool, typer.Option(help="Try those without a line only.")] = False,
    broken: Annotated[bool, typer.Option(help="Try those again that broke.")] = False,
    record: Annotated[Path, typer.Option(help="File of lines.")] = RECORD,
) -> None:
    """Try architectures, all unless told otherwise, and exit 1 where one is broken."""
    outcomes = read_record(record)
    names = only or architectures()
    if missing or broken:
        names = [name for name in names if _is_wanted(outcomes.get(name), missing, broken)]
    for name in names:
        outcomes[name] = in_a_process(name)
        write_record(outcomes, record)
        found = outcomes[name]
        typer.echo(f"{name}: {found.outcome} {found.difference or ''} {found.reason}")
    if record == RECORD:
        write_table(outcomes)
    raise typer.Exit(any(outcomes[name].outcome == BROKEN for name in names))


def _is_wanted(found: Outcome | None, missing: bool, broken: bool) -> bool:
    if found is None:
        return missing
    return broken and found.outcome == BROKEN


if __name__ == "__main__":
    typer.run(main)
