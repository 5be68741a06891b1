"""Train the demo pair: a small Llama target and a far smaller draft, from the standard library.

The text is the source of the CPython standard library, which every machine with Python has. The
draft is distilled from the target, because a draft is worth its overlap with the target,
``sum(min(target_probs, draft_probs))``, the chance that one drafted token is kept (Leviathan et
al. 2023, section 3.1, theorem 3.5), and not its own likelihood of the text.

The draft reads more than the target did: the source of the packages that the set-up installs, and
what the target itself writes (``more``).

``all`` runs the stages in order; each can also be run alone, and training resumes from its last
checkpoint. The learning rate follows the spent part of the budget, in minutes or in steps, so
that training ends annealed on any machine. With ``--steps`` and a named precision the weights
depend only on the seed, the text, the libraries and the number of threads.

    python -m scripts.demo_pair.train all --minutes 33 --draft-minutes 60

A draft that is annealed can be trained on in further goes, each with a budget of its own:

    python -m scripts.demo_pair.train draft-on checkpoints/demo/draft.pt --work checkpoints/more
"""

import sysconfig
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from scripts.demo_pair.card import export_pair
from scripts.demo_pair.samples import DRAFT_PARTS, SAMPLES, draft_text, sample, write_packages
from scripts.demo_pair.text import Tokens, corpus_files, prepare
from scripts.demo_pair.training import (
    Loss,
    Recipe,
    Run,
    Trainer,
    console,
    distillation_loss,
    faster_precision,
    load_trained,
    text_loss,
)

TARGET = Recipe(384, 5, 6, 2, 1152, learning_rate=3e-3, batch=8)
DRAFT = Recipe(128, 2, 4, 2, 256, learning_rate=4e-3)

app = typer.Typer(add_completion=False, no_args_is_help=True)

Work = Annotated[Path, typer.Option(help="Folder of checkpoints and tokens, not committed.")]
Out = Annotated[Path, typer.Option(help="Folder that gets target/, draft/ and the card.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or auto: the faster one here.")]
Minutes = Annotated[float, typer.Option(help="Time budget; training ends annealed at it.")]
Steps = Annotated[int, typer.Option(help="Train this many steps instead of a time.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch.")]
WORK, OUT = Path("checkpoints/demo"), Path("demo")


@app.command()
def corpus(work: Work = WORK) -> None:
    """Train the tokenizer and tokenise the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    prepare(work, root, corpus_files(root), TARGET.vocab)
    counts = {name: len(np.load(work / f"{name}.npy")) for name in ("train", "valid")}
    console.print(f"tokens: {counts['train']} to train on, {counts['valid']} held out")


@app.command()
def more(
    work: Work = WORK,
    one_in: Annotated[int, typer.Option(help="One file in so many of the packages.")] = 8,
    threads: Threads = 2,
) -> None:
    """Gather the draft's further text: installed packages, and what the trained target writes."""
    torch.set_num_threads(threads)
    count = write_packages(work, Path(sysconfig.get_path("purelib")), one_in)
    console.print(f"tokens of packages: {count}")
    wanted = next(part.num_tokens for part in DRAFT_PARTS if part.name == SAMPLES)
    model, _ = load_trained(work / "target.pt", TARGET, "cpu")
    np.save(work / f"{SAMPLES}.npy", sample(model, np.load(work / "train.npy"), wanted))


def distillation(work: Path, run: Run, least_late: float = 0.0) -> Loss:
    teacher, _ = load_trained(work / "target.pt", TARGET, run.device)
    return distillation_loss(teacher, run, least_late)


def target_text(work: Path) -> Tokens:
    tokens: Tokens = np.load(work / "train.npy")
    return tokens


def training(
    name: str,
    summary: str,
    recipe: Recipe,
    budget: float,
    text: Callable[[Path], Tokens],
    loss: Callable[[Path, Run], Loss],
) -> Callable[..., None]:
    """A command that trains one model of the pair; both take the same options."""

    def train(
        work: Work = WORK,
        minutes: Minutes = budget,
        steps: Steps = 0,
        device: Device = "cpu",
        precision: Precision = "auto",
        threads: Threads = 2,
    ) -> None:
        torch.set_num_threads(threads)
        tokens = text(work)
        if precision == "auto":
            precision = faster_precision(TARGET, device, tokens)
        run = Run(minutes, steps, device, precision)
        loss_of = loss(work, run)  # before the trainer, which seeds what is drawn from then on
        trainer = Trainer(recipe, run, work / f"{name}.pt")
        trainer.train(tokens, loss_of)
        console.print(f"{trainer.state} in {run.precision}")

    app.command(name, help=summary)(train)
    return train


target = training(
    "target",
    "Train the target on the text.",
    TARGET,
    33.0,
    target_text,
    lambda work, run: text_loss,
)
draft = training(
    "draft",
    "Distil the draft from the trained target.",
    DRAFT,
    60.0,
    lambda work: draft_text(work)[0],
    distillation,
)


@app.command("draft-on")
def draft_on(
    start: Annotated[Path, typer.Argument(help="Checkpoint of a draft whose training is over.")],
    work: Work = WORK,
    minutes: Minutes = 60.0,
    steps: Steps = 0,
    learning_rate: Annotated[float, typer.Option(help="Greatest of this go.")] = 2.5e-3,
    variation: Annotated[float, typer.Option(help="Total variation's part at the start.")] = 0.5,
    precision: Precision = "bf16",
    threads: Threads = 2,
) -> None:
    """Train a draft on in another go, annealed in its turn; a stopped go begins anew."""
    torch.set_num_threads(threads)
    run = Run(minutes, steps, "cpu", precision)
    loss_of = distillation(work, run, variation)
    trainer = Trainer(replace(DRAFT, learning_rate=learning_rate), run, None)
    trainer.start_from(start)
    trainer.checkpoint = work / "draft.pt"
    trainer.train(draft_text(work)[0], loss_of)
    console.print(f"{trainer.state} in {precision}")


@app.command()
def export(
    work: Work = WORK,
    out: Out = OUT,
    threads: Threads = 2,
    num_windows: Annotated[int, typer.Option(help="Held-out windows to measure over.")] = 64,
    note: Annotated[str, typer.Option(help="A remark on this training, for the card.")] = "",
) -> None:
    """Write both models in float16 with tokenizer, file list and card."""
    torch.set_num_threads(threads)
    trained = {
        name: load_trained(work / f"{name}.pt", recipe, "cpu")
        for name, recipe in (("target", TARGET), ("draft", DRAFT))
    }
    models = {name: model for name, (model, _) in trained.items()}
    history = {name: asdict(state) for name, (_, state) in trained.items()}
    console.print(export_pair(models, history, work, out, num_windows, note))


@app.command("all")
def run_all(
    work: Work = WORK,
    out: Out = OUT,
    minutes: Minutes = 33.0,
    draft_minutes: Minutes = 60.0,
    device: Device = "cpu",
    precision: Precision = "auto",
    threads: Threads = 2,
) -> None:
    """Run every stage in order; call it again after a stop and it goes on where it was."""
    if not (work / "valid.npy").exists():
        corpus(work)
    target(work, minutes, 0, device, precision, threads)
    if not (work / f"{SAMPLES}.npy").exists():
        more(work, threads=threads)
    draft(work, draft_minutes, 0, device, precision, threads)
    export(work, out, threads)


if __name__ == "__main__":
    app()
