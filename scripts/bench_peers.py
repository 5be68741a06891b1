"""Outrider beside what a user would pick instead: same weights, prompts, threads, lengths; greedy; batch 1 and 8.

Each peer lives in an environment of its own (``scripts/peers/setup PEER``) and answers jobs there
(``scripts/peers/PEER/run.py``); every run is a fresh process, and peers take turns within a round. What a peer cannot
do, and a peer that cannot be set up, is listed with the reason. Prompts are cut to one length, so that nobody pads, and
no token ends an answer, so that all make the same number of tokens. ``same_tokens`` compares with Transformers' plain
answers in float32, or where those are missing with our own.

``--processor-time`` counts seconds of processors instead of the clock's: what others do on the machine then hardly
matters, but waiting costs nothing and every thread that spins counts, so it wants ``--threads 1``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from scripts.bench_common import code_prompts
from scripts.bench_results import ROOT, Recorder, Row

OURS = "outrider"
PEERS = (OURS, "transformers", "openvino", "genai", "llamacpp")
FOLDER = ROOT / "scripts" / "peers"
_REASON_CHARACTERS = 160
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is asked; token ids in, token ids out.

    Attributes:
        target: checkpoint folder.
        draft: checkpoint folder of the draft.
        work: folder where the peer may keep what it made of the checkpoints.
        weights: float32 or int8.
        gamma: draft tokens per step; 0 is plain decoding.
        prompts: token ids, all equally many.
        counts_processor: whether seconds are those of the process on processors.
    """

    target: str
    draft: str
    work: str
    weights: str
    threads: int
    gamma: int
    batch: int
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    counts_processor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the result."""

    who: str
    weights: str
    batch: int
    gamma: int

    @property
    def way(self) -> str:
        """The cell's way of decoding, in words."""
        return f"gamma {self.gamma}" if self.gamma else "plain"


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
    """A peer's answer to a job: ``seconds`` and ``outputs``, or a ``reason``."""
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


def reference_of(
    answers: Mapping[Cell, Sequence[Mapping[str, Any]]], batch: int
) -> list[list[int]] | None:
    """Plain float32 answers that others are compared with."""
    for who in ("transformers", OURS):
        cell = Cell(who=who, weights="float32", batch=batch, gamma=0)
        for answer in answers.get(cell, ()):
            if "outputs" in answer:
                outputs: list[list[int]] = answer["outputs"]
                return outputs
    return None


def row_of_cell(
    cell: Cell, answers: Sequence[Mapping[str, Any]], reference: list[list[int]] | None
) -> Row:
    """Median speed over the rounds, or the reason why there is none."""
    case = {"who": cell.who, "way": cell.way, "weights": cell.weights, "batch": cell.batch}
    good = [answer for answer in answers if "seconds" in answer]
    if not good:
        return Row(case=case, figures={"tokens_per_s": None, "reason": answers[0]["reason"]})
    outputs = good[0]["outputs"]
    num_tokens = sum(len(output) for output in outputs)
    speeds = [num_tokens / answer["seconds"] for answer in good]
    return Row(
        case=case,
        figures={
            "tokens_per_s": statistics.median(speeds), "least": min(speeds), "most": max(speeds),
            "same_tokens": None if reference is None else same_share(outputs, reference), "reason": None,
        },
    )  # fmt: skip


def same_share(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of tokens up to each answer's first difference."""
    same = total = 0
    for ours, theirs in zip(outputs, reference, strict=True):
        total += len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            if one != other:
                break
            same += 1
    return same / total


def prompts_of(target: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Code prompts of ``num_tokens`` tokens each.

    Raises:
        typer.BadParameter: there are not that many of that length.
    """
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in code_prompts(8 * count)]
    prompts = [ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens][:count]
    if len(prompts) < count:
        raise typer.BadParameter(f"only {len(prompts)} prompts of {num_tokens} tokens")
    return prompts


def show(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table("who", "way", "weights", "batch", "tokens/s", "same tokens", "reason")
    for row in rows:
        speed, same = row.figures["tokens_per_s"], row.figures.get("same_tokens")
        table.add_row(
            *(str(value) for value in row.case.values()), "-" if speed is None else f"{speed:.1f}",
            "" if same is None else f"{same:.0%}", str(row.figures["reason"] or ""),
        )  # fmt: skip
    return table


def main(
    work: Annotated[Path, typer.Argument(help="folder for what peers make of the checkpoints")],
    target: Annotated[Path, typer.Option(help="checkpoint")] = ROOT / "demo" / "target",
    draft: Annotated[Path, typer.Option(help="checkpoint")] = ROOT / "demo" / "draft",
    peers: Annotated[str, typer.Option(help="comma-separated")] = ",".join(PEERS),
    weights: str = "float32,int8",
    gammas: Annotated[str, typer.Option(help="draft tokens; plain is always run")] = "2,4",
    batches: str = "1,8",
    num_prompts: int = 8,
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    rounds: int = 3,
    threads: int = 2,
    processor_time: bool = False,
    json_out: Path | None = None,
) -> None:
    """Run every peer in every way, in turns, and print median speeds or reasons."""
    recorder = Recorder("peers", "side by side with other engines, greedy", threads)
    names = peers.split(",")
    if unknown := set(names) - set(PEERS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not among {', '.join(PEERS)}")
    sizes = [int(one) for one in batches.split(",")]
    if num_prompts < max(sizes):
        raise typer.BadParameter(f"num-prompts must be at least {max(sizes)}")
    cells = [
        Cell(who=who, weights=kind, batch=batch, gamma=gamma)
        for kind in weights.split(",")
        for batch in sizes
        for gamma in (0, *(int(one) for one in gammas.split(",") if one))
        for who in names
    ]
    prompts = prompts_of(target, num_prompts, prompt_tokens)
    pythons = {who: python_of(who) for who in track(names, description="setting up")}
    answers: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for cell in track(cells, description="running"):
            python, reason = pythons[cell.who]
            if python is None:
                answers[cell].append({"reason": reason})
                continue
            if any("reason" in answer for answer in answers[cell]):
                continue  # it will not be able to in a later round either
            job = Job(
                target=str(target.resolve()), draft=str(draft.resolve()),
                work=str(work.resolve() / cell.who), weights=cell.weights, threads=threads, gamma=cell.gamma,
                batch=cell.batch, prompts=prompts, max_tokens=max_tokens, counts_processor=processor_time,
            )  # fmt: skip
            answers[cell].append(ask(cell.who, python, job))
    rows = [row_of_cell(cell, answers[cell], reference_of(answers, cell.batch)) for cell in cells]
    Console(width=140).print(show(rows))
    settings = {
        "target": target.name, "num_prompts": num_prompts, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens,
        "rounds": rounds, "processor_time": processor_time,
    }  # fmt: skip
    recorder.write(json_out, rows, settings)


if __name__ == "__main__":
    typer.run(main)
