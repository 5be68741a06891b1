"""How one model of the translating pair is trained: recipe, losses, checkpoints.

Knows nothing of where the pairs come from or of the other model, but for the distillation loss, which is made from a
trained target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from scripts.demo_pair.t5 import Shape, new_model
from scripts.demo_pair.text_pairs import PAD_ID, Pair, batches, padded
from scripts.demo_pair.training import CHECKPOINT_EVERY_S, Run, console, divergence, rate

PRINT_EVERY_STEPS = 50
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape of one model and how it is trained; ``batch_tokens`` counts padded tokens of sources and answers."""

    shape: Shape
    learning_rate: float
    batch_tokens: int = 4000


@dataclass(frozen=True, slots=True)
class Batch:
    """Pairs in matrices: sources [N, L], decoder inputs and answers [N, T], all int64."""

    source: torch.Tensor
    decoder_input: torch.Tensor
    answer: torch.Tensor

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Batch:
        """The matrices of some pairs; the decoder reads its answer shifted by one, behind the pad token."""
        answer = padded([pair.answer for pair in pairs], _IGNORED)
        shifted = functional.pad(answer[:, :-1].clamp(min=PAD_ID), (1, 0), value=PAD_ID)
        return cls(padded([pair.source for pair in pairs], PAD_ID), shifted, answer)

    @property
    def is_answer(self) -> torch.Tensor:
        """Which places hold a token of an answer, [N, T] bool."""
        return self.answer != _IGNORED


def answer_logits(model: T5ForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Logits behind every token of the answers, [num, V] float32, one row after another without padding."""
    read = (batch.source != PAD_ID).long()
    hidden = model.encoder(batch.source, attention_mask=read).last_hidden_state
    decoded = model.decoder(
        batch.decoder_input,
        encoder_hidden_states=hidden,
        encoder_attention_mask=read,
        use_cache=False,
    ).last_hidden_state
    logits: torch.Tensor = model.lm_head(decoded[batch.is_answer])
    return logits.float()


# (logits [num, V] float32, batch, progress in 0..1) -> scalar
Loss = Callable[[torch.Tensor, Batch, float], torch.Tensor]


def answer_loss(logits: torch.Tensor, batch: Batch, _progress: float) -> torch.Tensor:
    """Mean negative log-likelihood of the answers, in nats per token."""
    return functional.cross_entropy(logits, batch.answer[batch.is_answer])


def distillation_loss(target: T5ForConditionalGeneration, run: Run) -> Loss:
    """Loss of a draft against the full next-token distribution of ``target`` on the answers' prefixes.

    The total variation's part in it grows from 0 to 1.
    """

    def loss(logits: torch.Tensor, batch: Batch, progress: float) -> torch.Tensor:
        with torch.no_grad(), run.autocast():
            target_logits = answer_logits(target, batch)
        return divergence(target_logits, logits, progress)

    return loss


@dataclass
class State:
    """How far training is: steps, seconds and tokens in all, and the next batch: which pass, which of its batches."""

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    epoch: int = 0
    index: int = 0

    def progress(self, run: Run) -> float:
        """Spent part of the budget; it is over at 1."""
        return self.step / run.steps if run.steps else self.elapsed_s / (60 * run.minutes)


class PairTrainer:
    """One model in training, with its optimizers and checkpoint; weights that take no gradient stay as they are."""

    def __init__(
        self,
        model: T5ForConditionalGeneration,
        recipe: Recipe,
        run: Run,
        pairs: Sequence[Pair],
        checkpoint: Path | None,
    ) -> None:
        self.model, self.recipe, self.run = model.train(), recipe, run
        self.pairs, self.checkpoint = pairs, checkpoint
        self.optimizers = make_optimizers(model, recipe.learning_rate)
        self.state = State()
        if checkpoint is not None and checkpoint.exists():
            values = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(values["model"])
            for optimizer, saved in zip(self.optimizers, values["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.state = State(**values["state"])
        torch.manual_seed(run.seed + self.state.step)
        self._batches = self._pass()

    def _pass(self) -> list[list[Pair]]:
        rng = np.random.default_rng((self.run.seed, self.state.epoch))
        return batches(self.pairs, self.recipe.batch_tokens, rng)

    def save(self) -> None:
        """Replace the checkpoint in one move, so that a killed run leaves the one before."""
        if self.checkpoint is None:
            return
        values = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "state": asdict(self.state),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(values, partial)
        partial.replace(self.checkpoint)

    def step(self, loss_of: Loss) -> float:
        """Take one optimizer step on the next batch; its loss."""
        began, state = time.monotonic(), self.state
        progress = state.progress(self.run)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate * rate(progress)
        pairs = self._batches[state.index]
        batch = Batch.of(pairs)
        with self.run.autocast():
            logits = answer_logits(self.model, batch)
        loss = loss_of(logits, batch, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.step += 1
        state.tokens += sum(pair.num_tokens for pair in pairs)
        state.index += 1
        if state.index == len(self._batches):
            state.epoch, state.index = state.epoch + 1, 0
            self._batches = self._pass()
        state.elapsed_s += time.monotonic() - began
        value: float = loss.item()
        return value

    def train(self, loss_of: Loss) -> list[float]:
        """Train until the budget is spent, saving now and then; the losses of the steps."""
        saved_at, losses = self.state.elapsed_s, []
        while self.state.progress(self.run) < 1:
            losses.append(self.step(loss_of))
            if self.state.step % PRINT_EVERY_STEPS == 0:
                mean = sum(losses[-PRINT_EVERY_STEPS:]) / len(losses[-PRINT_EVERY_STEPS:])
                said = f"pass {self.state.epoch} step {self.state.step} loss {mean:.3f}"
                console.print(f"{said} after {self.state.elapsed_s:.0f} s", highlight=False)
            if self.state.elapsed_s - saved_at > CHECKPOINT_EVERY_S:
                self.save()
                saved_at = self.state.elapsed_s
        self.save()
        return losses


def make_optimizers(
    model: T5ForConditionalGeneration, learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and head and, undecayed, norms and position tables.

    Source: Jordan et al. 2024 (Muon); step sizes matched to AdamW's as in Liu et al. 2025 (Muon
    is scalable for LLM training), section 2.2.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vectors = [p for name, p in named if p.ndim <= 1 or "relative_attention_bias" in name]
    tables = [p for name, p in named if name in ("shared.weight", "lm_head.weight")]
    apart = {id(p) for p in (*vectors, *tables)}
    groups = [
        {"params": tables, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    muon = torch.optim.Muon(
        [p for _, p in named if id(p) not in apart],
        lr=learning_rate,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adamw, muon]


def load_trained(path: Path, recipe: Recipe) -> tuple[T5ForConditionalGeneration, State]:
    """The model of a checkpoint, float32 and in evaluation mode, and how it was trained."""
    values = torch.load(path, weights_only=True)
    model = new_model(recipe.shape)
    model.load_state_dict(values["model"])
    return model.eval(), State(**values["state"])
