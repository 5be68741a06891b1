"""What the demo pair is worth on held-out text, and the folder it is published in."""

import datetime
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from scripts.bench.tools.results import cpu_name
from scripts.demo_pair.samples import draft_text
from scripts.demo_pair.text import BOS, EOS, HELD_OUT_ONE_IN, held_out_windows

WINDOW = 512

CARD = """# Demo pair

A Llama target of {target_params:.2f}M parameters and a draft of {draft_params:.2f}M ({ratio:.1f} \
times fewer) with one byte-level BPE tokenizer of {vocab} tokens. They complete Python source; \
they are here to show and to test speculative decoding, not to write programs. Weights are \
float16.

- **Text**: source of the CPython {python} standard library without tests, generated tables and \
idlelib: {train_tokens:,} tokens to train on, {valid_tokens:,} held out (one file in \
{held_out}, chosen by a hash of its name). `files.sha256` lists every file.
- **Target**: {target_seen:,} tokens seen ({passes:.1f} passes) in {target_steps:,} steps, \
{target_minutes:.1f} minutes.
- **Draft**: distilled from the target's full next-token distributions, {draft_seen:,} tokens in \
{draft_steps:,} steps, {draft_minutes:.1f} minutes; KL divergence turning into total variation. One \
pass of its text is {draft_text}: `train.npy` is the text above, `packages.npy` the source of \
installed packages, `samples.npy` what the target itself writes.
- **Machine**: {machine}, {threads} threads, {date}, PyTorch {torch}.
- **Command**: `python -m scripts.demo_pair.train all --minutes {target_minutes:.1f} \
--draft-minutes {draft_minutes:.1f}`
{note}
| held-out text, {positions:,} positions in windows of {window} | |
|---|---|
| target, nats per token (perplexity) | {target_loss:.3f} ({target_perplexity:.1f}) |
| draft, nats per token (perplexity) | {draft_loss:.3f} ({draft_perplexity:.1f}) |
| alpha at temperature 1 | {overlap:.3f} ± {overlap_error:.3f} |
| alpha at temperature 0 | {agreement:.3f} ± {agreement_error:.3f} |

Alpha is the expected chance that one drafted token is kept (Leviathan et al. 2023, section 3.1): \
at temperature 1 the mean of sum(min(target_probs, draft_probs)) over positions, at temperature 0 \
the share of positions where both models' most likely token is the same. Both follow the text's \
own prefixes; ± is the standard error over windows.
"""


@dataclass(frozen=True)
class Figures:
    """Means over held-out positions; losses in nats per token, errors over windows."""

    positions: int
    target_loss: float
    draft_loss: float
    overlap: float
    overlap_error: float
    agreement: float
    agreement_error: float


def window_figures(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, following: torch.Tensor
) -> tuple[float, float, float, float]:
    """Target loss, draft loss, overlap and agreement of one window.

    Both logits are [T, V] float32; ``following`` is [T] int64, the token the text has next.
    """
    target_probs, draft_probs = target_logits.softmax(-1), draft_logits.softmax(-1)
    same = target_logits.argmax(-1) == draft_logits.argmax(-1)
    return (
        functional.cross_entropy(target_logits, following).item(),
        functional.cross_entropy(draft_logits, following).item(),
        torch.minimum(target_probs, draft_probs).sum(-1).mean().item(),
        same.float().mean().item(),
    )


def measure(target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: torch.Tensor) -> Figures:
    """Losses and alpha of the pair over windows of text, ``batch`` [N, T + 1] int64."""
    rows = []
    with torch.no_grad():
        for window in batch:
            inputs = window[None, :-1]
            logits = [m(inputs, use_cache=False).logits[0].float() for m in (target, draft)]
            rows.append(window_figures(logits[0], logits[1], window[1:]))
    values = np.array(rows)
    means, errors = values.mean(0), values.std(0) / np.sqrt(len(values))
    target_loss, draft_loss, overlap, agreement = map(float, means)
    return Figures(
        batch[:, 1:].numel(), target_loss, draft_loss,
        overlap, float(errors[2]), agreement, float(errors[3]),
    )  # fmt: skip


def save_model(
    model: PreTrainedModel, tokenizer: Path, out: Path, *, max_length: int, **special: str
) -> None:
    """Write one float16 checkpoint with its tokenizer, as ``from_pretrained`` reads it.

    ``model`` keeps its dtype but takes on the rounded weights, so that what is measured
    afterwards is what was written. ``special`` are the tokenizer's special tokens, such as ``eos_token``.
    """
    shutil.rmtree(out, ignore_errors=True)
    rounded = model.half()
    rounded.config.dtype = torch.float16
    rounded.save_pretrained(out)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)
    model.float()
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tokenizer)),
        **special,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


def export_pair(
    models: Mapping[str, LlamaForCausalLM],
    history: Mapping[str, Mapping[str, float]],
    work: Path,
    out: Path,
    num_windows: int,
    note: str = "",
) -> Figures:
    """Write ``out/target``, ``out/draft``, the file list and the card with its measurements.

    Args:
        models: ``target`` and ``draft``, float32.
        history: for each, ``step``, ``tokens`` and ``elapsed_s`` of its training.
        work: folder with tokenizer.json, files.sha256, train.npy and valid.npy.
        out: folder to publish in.
        num_windows: held-out windows to measure over.
        note: what else a reader of the card must know about this training.
    """
    for name, model in models.items():
        save_model(
            model,
            work / "tokenizer.json",
            out / name,
            max_length=model.config.max_position_embeddings,
            bos_token=BOS,
            eos_token=EOS,
        )
    shutil.copyfile(work / "files.sha256", out / "files.sha256")
    train, valid = np.load(work / "train.npy"), np.load(work / "valid.npy")
    batch = held_out_windows(valid, num_windows, WINDOW)
    figures = measure(models["target"], models["draft"], batch)
    params = {name: model.num_parameters() / 1e6 for name, model in models.items()}
    text = CARD.format(
        **vars(figures),
        target_params=params["target"],
        draft_params=params["draft"],
        ratio=params["target"] / params["draft"],
        vocab=models["target"].config.vocab_size,
        python=platform.python_version(),
        train_tokens=len(train),
        valid_tokens=len(valid),
        held_out=HELD_OUT_ONE_IN,
        target_seen=history["target"]["tokens"],
        passes=history["target"]["tokens"] / len(train),
        target_steps=history["target"]["step"],
        target_minutes=history["target"]["elapsed_s"] / 60,
        draft_text=draft_text(work)[1],
        draft_steps=history["draft"]["step"],
        draft_seen=history["draft"]["tokens"],
        draft_minutes=history["draft"]["elapsed_s"] / 60,
        machine=cpu_name(),
        threads=torch.get_num_threads(),
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        window=WINDOW,
        note=f"- **Note**: {note}\n" if note else "",
        target_perplexity=np.exp(figures.target_loss),
        draft_perplexity=np.exp(figures.draft_loss),
    )
    (out / "README.md").write_text(text)
    return figures
