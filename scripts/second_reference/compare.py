"""Our graphs against optimum-onnx's: exporters, versions of Transformers and code of attention are all different.

Tiny random models of three families are exported by both. ``bash scripts/second_reference/setup`` makes the environment
of the second one.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import typer
from outrider.engines.base import FloatArray, IntArray
from outrider.export.certificate.feeds import Sources
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.graph.to_onnx import export_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from scripts.check_parity import random_model

FAMILIES = ("llama", "gpt2", "t5")
MOST_DIFFERENCE = 1e-4
_ROOT = Path(__file__).parents[2]
_BATCH, _TOKENS, _SOURCE = 2, 24, 17
_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two exports are from each other.

    Attributes:
        difference: the worst difference of logits, as a share of the largest.
        num_greedy_equal: tokens whose likeliest successor is the same.
        num_compared: tokens.
    """

    difference: float
    num_greedy_equal: int
    num_compared: int


def second_python() -> Path | None:
    """Return the Python of optimum-onnx's environment; None where nobody made it."""
    venv = Path(os.environ.get("OPTIMUM_ONNX_VENV", _ROOT / ".venv-optimum-onnx"))
    python = venv / "bin" / "python"
    return python if python.exists() else None


def compare(family: str, python: Path) -> Comparison:
    """Return how far our graph of a family's tiny model is from that of optimum-onnx, run by its Python."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _tiny(family).save_pretrained(folder / "checkpoint")
        checkpoint = open_checkpoint(folder / "checkpoint", max_context=_CONTEXT)
        facts = checkpoint.facts
        tokens = random.integers(0, facts.vocab_size, (_BATCH, _TOKENS))
        source = random.integers(0, facts.vocab_size, (_BATCH, _SOURCE)) if facts.source else None
        ours = _our_logits(checkpoint, tokens, source, folder / "ours" / "model.onnx")
        theirs = _their_logits(checkpoint, tokens, source, folder, python)
    return Comparison(
        difference=float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        num_greedy_equal=int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        num_compared=tokens.size,
    )


def _tiny(family: str) -> PreTrainedModel:
    if family != "t5":
        return random_model(family, num_positions=_CONTEXT)
    torch.manual_seed(5)
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
    config = AutoConfig.for_model("t5", num_layers=2, decoder_start_token_id=0, **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    for (
        parameter
    ) in model.parameters():  # norms and biases by distance too: an ignored one must show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def _our_logits(
    checkpoint: Checkpoint, tokens: IntArray, source: IntArray | None, path: Path
) -> FloatArray:
    export_model(checkpoint.load(), path, num_positions=_CONTEXT, num_source_positions=_CONTEXT)
    sizes = {"batch": _BATCH, "capacity": _CONTEXT, "source_capacity": _CONTEXT}
    runner = GraphRunner(path, checkpoint.facts, **sizes)
    if source is not None:
        runner.read(Sources(tokens=source, lengths=np.full(_BATCH, _SOURCE)))
    return runner.extend(tokens, np.zeros(_BATCH, np.int64))


def _their_logits(
    checkpoint: Checkpoint,
    tokens: IntArray,
    source: IntArray | None,
    folder: Path,
    python: Path,
) -> FloatArray:
    script = Path(__file__).with_name("answer.py")
    prompts, logits = folder / "prompts.npz", folder / "logits.npy"
    given = {"tokens": tokens} | ({} if source is None else {"source": source})
    np.savez(prompts, **given)  # type: ignore[arg-type]
    arguments = [script, checkpoint.path, checkpoint.task, prompts, logits]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(
        [str(one) for one in (python, *arguments)], check=True, env=environment, capture_output=True
    )
    answered: FloatArray = np.load(logits)
    return answered


def main() -> None:
    """Compare three families, and exit 1 where any differs by more than 1e-4 of its logits."""
    python = second_python()
    if python is None:
        raise typer.BadParameter("no environment: bash scripts/second_reference/setup")
    worst = 0.0
    for family in FAMILIES:
        found = compare(family, python)
        worst = max(worst, found.difference)
        typer.echo(
            f"{family}: {found.difference:.1e} of the logits, "
            f"{found.num_greedy_equal} of {found.num_compared} greedy tokens equal"
        )
    raise typer.Exit(worst > MOST_DIFFERENCE)


if __name__ == "__main__":
    typer.run(main)
