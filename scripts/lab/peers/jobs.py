"""Jobs for peers: one process answers one job, in the environment that ``scripts/lab/peers/setup`` made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.tools.results import ROOT

OURS = "outrider"
PEERS = (OURS, "transformers", "openvino", "genai", "llamacpp", "ctranslate2")
FOLDER = ROOT / "scripts" / "lab" / "peers"
_REASON_CHARACTERS = 160
_LIMIT_S = 3600.0  # of the first job of a model, which makes the peer's own form of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of one process; token ids in, token ids out.

    Attributes:
        target: checkpoint folder.
        draft: checkpoint folder of the draft.
        work: folder where the peer may keep what it made of the checkpoints.
        weights: float32, int8 or int4.
        drafter: what proposes; None is plain decoding.
        gamma: draft tokens per step; 0 is plain decoding, None leaves the choice to the side.
        ngram: tokens that a peer's prompt lookup matches, at most; ours has its own setting.
        prompts: token ids, all equally many.
        reads_source: whether the models have an encoder, which reads the prompts.
    """

    target: str
    draft: str
    work: str
    weights: str
    threads: int
    drafter: str | None
    gamma: int | None
    ngram: int
    batch: int
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    reads_source: bool = False


def python_of(peer: str) -> tuple[str | None, str]:
    """A peer's Python, its environment made where it is missing; None, and why, where that fails."""
    if peer == OURS:
        return sys.executable, ""
    done = subprocess.run(
        ["bash", str(FOLDER / "setup"), peer], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        return None, f"cannot be installed: {_last_line(done.stderr)}"
    return done.stdout.strip().splitlines()[-1], ""


def ask(peer: str, python: str, job: Job) -> dict[str, Any]:
    """A peer's answer to a job: ``seconds`` and ``outputs``, or a ``reason``.

    A reason comes with ``is_unable`` where the peer has no such way at all, whatever gamma is.
    """
    work = Path(job.work)
    work.mkdir(parents=True, exist_ok=True)
    question, answer = work / "job.json", work / "answer.json"
    question.write_text(json.dumps(asdict(job)))
    answer.unlink(missing_ok=True)
    command = [python, str(FOLDER / peer / "run.py"), str(question), str(answer)]
    places = [FOLDER / "shared", *([ROOT] if peer == OURS else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"no answer within {_LIMIT_S:.0f} s"}
    if done.returncode:
        return {"reason": f"failed: {_last_line(done.stderr)}"}
    found: dict[str, Any] = json.loads(answer.read_text())
    lengths = {len(output) for output in found.get("outputs", [])}
    if lengths - {job.max_tokens}:
        return {"reason": f"made {sorted(lengths)} tokens instead of {job.max_tokens}"}
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARACTERS] if lines else "without a word"
