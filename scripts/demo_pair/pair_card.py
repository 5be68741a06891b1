"""What the translating pair is worth on held-out text, and the folder it is published in."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from scripts.bench.tools.results import cpu_name
from scripts.demo_pair.card import save_model
from scripts.demo_pair.pair_training import Batch, State, answer_logits
from scripts.demo_pair.text import HELD_OUT_ONE_IN
from scripts.demo_pair.text_pairs import (
    EOS,
    PAD,
    SUMMARIZE,
    TRANSLATE,
    UNKNOWN,
    Pair,
    batches,
    load_pairs,
)

_BATCH_TOKENS = 6000
_MAX_LENGTH = 512
_SAMPLES = (
    "The file could not be opened.",
    "Show this help message and exit.",
    "cannot remove directory '%s': permission denied",
    "The connection to the server was lost.",
    "--verbose can only be used together with --list",
    "invalid number of arguments",
)

CARD = """# Translating pair

A T5 target of {target_params}M parameters and two drafts with one byte-level BPE tokenizer of {vocab} tokens, in \
the form of T5 v1.1. They translate messages of programs from English to German (a source that begins with \
`{translate}`) and say what a Python function does (`{summarize}`); they are here to show and to test speculative \
decoding, not to translate manuals. Weights are float16.

- **Text**: the German message catalogues of the programs that were installed, and the functions of the CPython \
standard library with the first paragraph of their docstrings: {train_pairs} pairs, {train_tokens} tokens to train \
on, {valid_pairs:,} pairs held out (one in {held_out}, chosen by a hash of its source). `files.sha256` lists every \
file; each belongs to its own project, and none of their text is here.
- **Target**: {target_history}.
- **Draft** ({draft_params}M): an encoder of its own; distilled from the target's full next-token distributions, \
{draft_history}; KL divergence turning into total variation.
- **Shared draft** ({shared_draft_params}M): the target's encoder, copied, and the first layer of its decoder, \
distilled alike, {shared_draft_history}.
- **Machine**: {machine}, {threads} threads, {date}, PyTorch {torch}.
- **Command**: `python -m scripts.demo_pair.ende all`
{note}
Held-out pairs, the references as prefixes; alpha is the expected chance that one drafted token is kept (Leviathan et \
al. 2023, section 3.1): at temperature 1 the mean of sum(min(target_probs, draft_probs)), at temperature 0 the share \
of positions where both models' most likely token is the same; ± is the standard error over pairs.

| task | model | nats per token (perplexity) | alpha at temperature 1 | alpha at temperature 0 |
|---|---|---|---|---|
{rows}

What the target makes of some messages, greedy; whether its text has them was not looked up:

| English | German |
|---|---|
{samples}
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over held-out tokens of one model beside the target: nats per token and alphas, errors over pairs."""

    loss: float
    overlap: float
    overlap_error: float
    agreement: float
    agreement_error: float


def measure(
    target: T5ForConditionalGeneration, model: T5ForConditionalGeneration, pairs: Sequence[Pair]
) -> Figures:
    """Loss of a model and alpha of the target with it as its draft, over the pairs' answers."""
    rows = []
    with torch.no_grad():
        for batch in (Batch.of(part) for part in batches(pairs, _BATCH_TOKENS)):
            target_logits, logits = (answer_logits(one, batch) for one in (target, model))
            overlap = torch.minimum(target_logits.softmax(-1), logits.softmax(-1)).sum(-1)
            answer = batch.answer[batch.is_answer]
            loss = functional.cross_entropy(logits, answer, reduction="none")
            agreement = (target_logits.argmax(-1) == logits.argmax(-1)).float()
            lengths = batch.is_answer.sum(1).tolist()
            values = torch.stack([torch.ones_like(loss), loss, overlap, agreement], 1)
            rows += [part.sum(0).tolist() for part in values.split(lengths)]
    counts, *sums = np.array(rows).T
    means = [float(one.sum() / counts.sum()) for one in sums]
    errors = [
        float(np.sqrt(np.sum((one - mean * counts) ** 2)) / counts.sum())
        for one, mean in zip(sums, means, strict=True)
    ]
    return Figures(means[0], means[1], errors[1], means[2], errors[2])


def translations(
    model: T5ForConditionalGeneration, tokenizer: Tokenizer, sentences: Sequence[str]
) -> list[str]:
    """What a model makes of English sentences, greedy."""
    made = []
    for sentence in sentences:
        source = torch.tensor([tokenizer.encode(TRANSLATE + sentence).ids])
        with torch.no_grad():
            tokens = model.generate(source, max_new_tokens=64, do_sample=False)  # type: ignore[operator]
        made.append(tokenizer.decode(tokens[0].tolist()))
    return made


def export_pair(
    models: Mapping[str, T5ForConditionalGeneration],
    history: Mapping[str, State],
    work: Path,
    out: Path,
    note: str = "",
) -> dict[tuple[str, str], Figures]:
    """Write every model's folder, the file list and the card with its measurements.

    Args:
        models: ``target``, ``draft`` and ``shared_draft``, float32.
        history: how each was trained.
        work: folder with tokenizer.json, files.sha256, train.npz and valid.npz.
        out: folder to publish in.
        note: what else a reader of the card must know about this training.

    Returns:
        figures by task and model.
    """
    for name, model in models.items():
        save_model(
            model,
            work / "tokenizer.json",
            out / name,
            max_length=_MAX_LENGTH,
            pad_token=PAD,
            eos_token=EOS,
            unk_token=UNKNOWN,
        )
    shutil.copyfile(work / "files.sha256", out / "files.sha256")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    valid = by_task(load_pairs(work / "valid.npz"), tokenizer)
    figures = {
        (task, name): measure(models["target"], model, pairs)
        for task, pairs in valid.items()
        for name, model in models.items()
    }
    said = {"rows": "\n".join(_row(task, name, one) for (task, name), one in figures.items())}
    said |= {
        "note": f"- **Note**: {note}\n" if note else "",
        "samples": _samples(models["target"], tokenizer),
    }
    said |= _training(models, history, load_pairs(work / "train.npz"))
    text = CARD.format(
        vocab=tokenizer.get_vocab_size(),
        translate=TRANSLATE,
        summarize=SUMMARIZE,
        valid_pairs=sum(map(len, valid.values())),
        held_out=HELD_OUT_ONE_IN,
        machine=cpu_name(),
        threads=torch.get_num_threads(),
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        **said,
    )
    (out / "README.md").write_text(text)
    return figures


def _training(
    models: Mapping[str, T5ForConditionalGeneration],
    history: Mapping[str, State],
    train: Sequence[Pair],
) -> dict[str, str]:
    """The card's words on the text of the training, and on each model's size and training."""
    num_tokens = sum(pair.num_tokens for pair in train)
    said = {"train_pairs": f"{len(train):,}", "train_tokens": f"{num_tokens:,}"}
    for name, one in history.items():
        passes, minutes = one.tokens / num_tokens, one.elapsed_s / 60
        said[f"{name}_params"] = f"{models[name].num_parameters() / 1e6:.2f}"
        said[f"{name}_history"] = (
            f"{one.tokens:,} tokens ({passes:.1f} passes) in {one.step:,} steps, {minutes:.0f} minutes"
        )
    return said


def _samples(target: T5ForConditionalGeneration, tokenizer: Tokenizer) -> str:
    """The card's table of translations."""
    made = zip(_SAMPLES, translations(target, tokenizer, _SAMPLES), strict=True)
    return "\n".join(f"| `{english}` | `{german}` |" for english, german in made)


def by_task(pairs: Sequence[Pair], tokenizer: Tokenizer) -> dict[str, list[Pair]]:
    """The pairs of each task, told apart by the first token of their sources."""
    tasks = {"translate": TRANSLATE, "summarize": SUMMARIZE}
    firsts = {tokenizer.encode(text).ids[0]: name for name, text in tasks.items()}
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(firsts[int(pair.source[0])], []).append(pair)
    return found


def _row(task: str, name: str, one: Figures) -> str:
    """One line of the card's table; the target has no alpha beside itself."""
    alphas = (
        "| | |"
        if name == "target"
        else f"| {one.overlap:.3f} ± {one.overlap_error:.3f} | {one.agreement:.3f} ± {one.agreement_error:.3f} |"
    )
    return f"| {task} | {name} | {one.loss:.3f} ({np.exp(one.loss):.1f}) {alphas}"
