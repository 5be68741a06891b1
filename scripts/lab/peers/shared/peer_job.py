"""Shared by every peer's run.py: read a job, load, run it once to warm up and once on the clock, write the answer.

Standard library only: this runs in each peer's own environment. A job is a JSON object
(``scripts/lab/peers/jobs.py`` says what is in it), the answer another: ``seconds`` and ``outputs`` (token ids, one list
a prompt), or the ``reason`` why this peer cannot do this, with ``is_unable`` where that holds for every gamma.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
Run = Callable[[Sequence[Sequence[int]]], Tokens]


class UnableError(Exception):
    """The peer has no such feature, at no gamma; the text says which."""


class FixedGammaError(Exception):
    """The peer leaves gamma to its user."""


def refuse_unless(job: Mapping[str, Any], *drafters: str) -> None:
    """Hold the job's drafter against those that the peer has.

    Raises:
        UnableError: it has not.
    """
    if job["drafter"] is not None and job["drafter"] not in drafters:
        raise UnableError(f"has no drafter {job['drafter']}")


def refuse_sources(job: Mapping[str, Any]) -> None:
    """Refuse a model with an encoder.

    Raises:
        UnableError: the job has one.
    """
    if job["reads_source"]:
        raise UnableError("has no encoder-decoder models")


def take(job: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Run the job's prompts in batches, after one batch has warmed everything up.

    That batch has other prompts: some peers keep what they computed of a prompt that comes again.
    """
    prompts, batch = job["prompts"], job["batch"]
    run([prompt[::-1] for prompt in prompts[:batch]])
    began = time.perf_counter()
    outputs: Tokens = []
    for first in range(0, len(prompts), batch):
        outputs += run(prompts[first : first + batch])
    return {"seconds": time.perf_counter() - began, "outputs": outputs}


def main(load: Callable[[Mapping[str, Any]], Run]) -> None:
    """Answer the job in the file ``argv[1]`` into the file ``argv[2]``."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        answer = take(job, load(job))
    except UnableError as error:
        answer = {"reason": str(error), "is_unable": True}
    except FixedGammaError:
        answer = {"reason": f"does not choose gamma of drafter {job['drafter']}"}
    Path(sys.argv[2]).write_text(json.dumps(answer))


def converted(job: Mapping[str, Any], part: str, convert: Callable[[Path, Path], None]) -> Path:
    """Folder of the job's ``target`` or ``draft`` in the peer's own form, made once."""
    out = Path(job["work"]) / f"{part}-{job['weights']}"
    done = out / "done"
    if not done.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        convert(Path(job[part]), out)
        done.touch()
    return out
