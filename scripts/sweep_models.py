"""Every causal-LM architecture of Transformers as a tiny random model: exported with parity, or refused by name.

One process each, with a limit of time and memory; one line of JSON each in ``scripts/sweep/architectures.jsonl``.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import resource
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from scripts.sweep.cell import BROKEN, Outcome, try_architecture

RECORD = Path(__file__).parent / "sweep" / "architectures.jsonl"
_TIME_LIMIT_S = 300
_MEMORY_BYTES = 12 << 30


def architectures() -> list[str]:
    """Return the names of all causal-LM architectures that Transformers knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_record(path: Path = RECORD) -> dict[str, Outcome]:
    """Return what is known, by architecture; of several lines the last one counts."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one.name: one for one in (Outcome(**json.loads(line)) for line in lines)}


def write_record(outcomes: dict[str, Outcome], path: Path = RECORD) -> None:
    """Write a line per architecture, by name."""
    lines = [json.dumps(outcomes[name].as_line()) for name in sorted(outcomes)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def in_a_process(name: str) -> Outcome:
    """Return what comes of an architecture, in a process that may die."""
    # A fork: what is imported here need not be imported again.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_TIME_LIMIT_S):
            return Outcome(name=name, outcome=BROKEN, reason=f"not done in {_TIME_LIMIT_S} s")
        found: Outcome = receiver.recv()
        return found
    except EOFError:
        process.join()
        return Outcome(name=name, outcome=BROKEN, reason=f"died with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _child(name: str, sender: multiprocessing.connection.Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    sender.send(try_architecture(name))


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
    raise typer.Exit(any(outcomes[name].outcome == BROKEN for name in names))


def _is_wanted(found: Outcome | None, missing: bool, broken: bool) -> bool:
    if found is None:
        return missing
    return broken and found.outcome == BROKEN


if __name__ == "__main__":
    typer.run(main)
