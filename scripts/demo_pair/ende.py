"""Train the translating pair: a small T5 target and two far smaller drafts, from what a machine has installed.

The text is the German message catalogues of installed programs and the functions of the CPython standard library. Both
drafts are distilled from the target: one has an encoder of its own, the other reads with the target's, which is copied
and stays as it is, so that in service one encoder does for both.

``all`` runs the stages in order; each can also be run alone, and training resumes from its last checkpoint. The
learning rate follows the spent part of the budget, in minutes or in steps, so that training ends annealed on any
machine.

    python -m scripts.demo_pair.ende all --minutes 40 --draft-minutes 10
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import T5ForConditionalGeneration

from scripts.demo_pair.catalogues import LOCALES
from scripts.demo_pair.pair_card import export_pair
from scripts.demo_pair.pair_training import (
    Loss,
    PairTrainer,
    Recipe,
    answer_loss,
    distillation_loss,
    load_trained,
)
from scripts.demo_pair.t5 import Shape, new_model, share_encoder
from scripts.demo_pair.text_pairs import load_pairs, prepare
from scripts.demo_pair.training import Run, console

TARGET = Recipe(
    Shape(hidden=128, encoder_layers=3, decoder_layers=2, heads=4, intermediate=384), 4e-3
)
DRAFT = Recipe(
    Shape(hidden=64, encoder_layers=1, decoder_layers=1, heads=2, intermediate=192), 4e-3
)
SHARED_DRAFT = Recipe(
    Shape(hidden=128, encoder_layers=3, decoder_layers=1, heads=4, intermediate=384), 2e-3
)

app = typer.Typer(add_completion=False, no_args_is_help=True)

Work = Annotated[Path, typer.Option(help="Folder of checkpoints and tokens, not committed.")]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.")]
Minutes = Annotated[float, typer.Option(help="Time budget; training ends annealed at it.")]
Steps = Annotated[int, typer.Option(help="Train this many steps instead of a time.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.")]
WORK, OUT = Path("checkpoints/ende"), Path("demo/ende")


@app.command()
def corpus(work: Work = WORK) -> None:
    """Train the tokenizer and tokenise catalogues and standard library."""
    prepare(work, LOCALES, Path(sysconfig.get_path("stdlib")))
    for name in ("train", "valid"):
        pairs = load_pairs(work / f"{name}.npz")
        console.print(f"{name}: {len(pairs)} pairs, {sum(p.num_tokens for p in pairs)} tokens")


def _train(
    name: str, model: T5ForConditionalGeneration, recipe: Recipe, run: Run, loss: Loss, work: Path
) -> None:
    pairs = load_pairs(work / "train.npz")
    trainer = PairTrainer(model, recipe, run, pairs, work / f"{name}.pt")
    trainer.train(loss)
    console.print(f"{name}: {trainer.state} in {run.precision}")


@app.command()
def target(
    work: Work = WORK,
    minutes: Minutes = 40.0,
    steps: Steps = 0,
    precision: Precision = "bf16",
    threads: Threads = 2,
) -> None:
    """Train the target on the text."""
    torch.set_num_threads(threads)
    run = Run(minutes, steps, precision=precision)
    torch.manual_seed(run.seed)
    _train("target", new_model(TARGET.shape), TARGET, run, answer_loss, work)


@app.command()
def draft(
    work: Work = WORK,
    minutes: Minutes = 10.0,
    steps: Steps = 0,
    precision: Precision = "bf16",
    threads: Threads = 2,
) -> None:
    """Distil the draft with its own encoder from the trained target."""
    torch.set_num_threads(threads)
    run = Run(minutes, steps, precision=precision)
    teacher, _ = load_trained(work / "target.pt", TARGET)
    torch.manual_seed(run.seed)
    _train("draft", new_model(DRAFT.shape), DRAFT, run, distillation_loss(teacher, run), work)


@app.command("shared-draft")
def shared_draft(
    work: Work = WORK,
    minutes: Minutes = 10.0,
    steps: Steps = 0,
    precision: Precision = "bf16",
    threads: Threads = 2,
) -> None:
    """Distil the draft that reads with the target's encoder."""
    torch.set_num_threads(threads)
    run = Run(minutes, steps, precision=precision)
    teacher, _ = load_trained(work / "target.pt", TARGET)
    torch.manual_seed(run.seed)
    model = share_encoder(teacher, new_model(SHARED_DRAFT.shape))
    _train("shared_draft", model, SHARED_DRAFT, run, distillation_loss(teacher, run), work)


@app.command()
def export(
    work: Work = WORK,
    out: Annotated[Path, typer.Option(help="Folder that gets the models and the card.")] = OUT,
    threads: Threads = 2,
    note: Annotated[str, typer.Option(help="What the card must say besides.")] = "",
) -> None:
    """Publish the trained models with a card of what they are worth."""
    torch.set_num_threads(threads)
    recipes = {"target": TARGET, "draft": DRAFT, "shared_draft": SHARED_DRAFT}
    trained = {name: load_trained(work / f"{name}.pt", one) for name, one in recipes.items()}
    models = {name: model for name, (model, _) in trained.items()}
    history = {name: state for name, (_, state) in trained.items()}
    for (task, name), figures in export_pair(models, history, work, out, note).items():
        console.print(f"{task} {name}: {figures}")


@app.command("all")
def run_all(
    work: Work = WORK,
    out: Annotated[Path, typer.Option(help="Folder that gets the models and the card.")] = OUT,
    minutes: Minutes = 40.0,
    draft_minutes: Annotated[float, typer.Option(help="Time budget of each draft.")] = 10.0,
    precision: Precision = "bf16",
    threads: Threads = 2,
) -> None:
    """Run every stage in order; call it again after a stop and it goes on where it was."""
    if not (work / "valid.npz").exists():
        corpus(work)
    target(work, minutes, 0, precision, threads)
    draft(work, draft_minutes, 0, precision, threads)
    shared_draft(work, draft_minutes, 0, precision, threads)
    export(work, out, threads)


if __name__ == "__main__":
    app()
