"""How one model of the demo pair is trained: recipe, budget, losses, optimizers, checkpoints.

Knows nothing of where the text comes from or of the other model, but for the distillation loss,
which is made from a trained target.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.demo_pair.text import Tokens, windows

WARMUP_FRACTION = 0.02
CHECKPOINT_EVERY_S = 120.0
PRINT_EVERY_STEPS = 20
MAX_CONTEXT = 2048

console = Console()


@dataclass(frozen=True)
class Recipe:
    """Shape of one model and how it is trained; lengths in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    learning_rate: float
    batch: int = 4
    length: int = 512
    vocab: int = 4096

    def config(self) -> LlamaConfig:
        """The Llama configuration of this shape, input and output embeddings tied."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=MAX_CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )


@dataclass(frozen=True)
class Run:
    """How long and where to train; ``steps`` above 0 takes the place of ``minutes``."""

    minutes: float = 30.0
    steps: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    seed: int = 1

    def autocast(self) -> AbstractContextManager[None]:
        """Context in which matrix products have this run's precision; weights stay float32."""
        enabled = self.precision == "bf16"
        context: AbstractContextManager[None] = torch.autocast(
            self.device, dtype=torch.bfloat16, enabled=enabled
        )
        return context


@dataclass
class State:
    """How far training is: what a checkpoint holds besides weights and optimizer.

    Steps, seconds and tokens are of all goes together, the first ones those at which the present go began.
    """

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    first_step: int = 0
    first_s: float = 0.0

    def progress(self, run: Run) -> float:
        """Spent part of the go's budget; it is over at 1."""
        if run.steps:
            return (self.step - self.first_step) / run.steps
        return (self.elapsed_s - self.first_s) / (60 * run.minutes)


# (logits [B, T, V] float32, batch [B, T + 1] int64, progress in 0..1) -> scalar
Loss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def text_loss(logits: torch.Tensor, batch: torch.Tensor, _progress: float) -> torch.Tensor:
    """Mean negative log-likelihood of the text, in nats per token."""
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def divergence(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, late: float
) -> torch.Tensor:
    """Mean distance of the draft's rows from the target's, both logits [..., V] float32.

    At ``late`` = 0 the Kullback-Leibler divergence, at 1 the total variation, mixed in between.
    Total variation is 1 minus the overlap, which is what counts, but its gradient vanishes where
    the draft has no mass; KL brings the mass there first.

    Source: Leviathan et al. 2023, section 3.1, corollary 3.6, alpha = 1 - E(D_LK(p, q)); p is
    target_probs, q is draft_probs. Both losses are compared in Zhou et al. 2024 (DistillSpec).
    """
    target_log, draft_log = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    target_probs, draft_probs = target_log.exp(), draft_log.exp()
    kl = (target_probs * (target_log - draft_log)).sum(-1).mean()
    variation = 0.5 * (target_probs - draft_probs).abs().sum(-1).mean()
    # Near the end KL is about twice the variation: the weight 2 keeps the gradient's size.
    return (1 - late) * kl + 2 * late * variation


def distillation_loss(target: LlamaForCausalLM, run: Run, least_late: float = 0.0) -> Loss:
    """Loss of a draft against the full next-token distribution of ``target`` on the text's prefixes.

    The total variation's part in it grows from ``least_late`` to 1.
    """

    def loss(logits: torch.Tensor, batch: torch.Tensor, progress: float) -> torch.Tensor:
        with torch.no_grad(), run.autocast():
            target_logits = target(batch[:, :-1], use_cache=False).logits
        late = least_late + (1 - least_late) * progress
        return divergence(target_logits.float(), logits, late)

    return loss


def rate(progress: float) -> float:
    """Multiplier of the learning rate: linear warm-up, then cosine down to 0 at progress 1."""
    if progress < WARMUP_FRACTION:
        return max(progress, 1e-3) / WARMUP_FRACTION
    done = (progress - WARMUP_FRACTION) / (1 - WARMUP_FRACTION)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimizers(model: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and, undecayed, the norms' scales.

    Source: Jordan et al. 2024 (Muon); step sizes matched to AdamW's as in Liu et al. 2025 (Muon
    is scalable for LLM training), section 2.2.
    """
    named = list(model.named_parameters())
    embeddings = [p for name, p in named if p.ndim > 1 and "embed" in name]
    matrices = [p for name, p in named if p.ndim > 1 and "embed" not in name]
    groups = [
        {"params": embeddings, "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    muon = torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    return [adamw, muon]


class Trainer:
    """One model in training, with its optimizer and checkpoint."""

    def __init__(self, recipe: Recipe, run: Run, checkpoint: Path | None) -> None:
        torch.manual_seed(run.seed)
        self.recipe, self.run, self.checkpoint = recipe, run, checkpoint
        self.model = LlamaForCausalLM(recipe.config()).to(run.device)
        self.optimizers = make_optimizers(self.model, recipe.learning_rate)
        self.state = State()
        if checkpoint is not None and checkpoint.exists():
            values = torch.load(checkpoint, map_location=run.device, weights_only=True)
            self.model.load_state_dict(values["model"])
            for optimizer, saved in zip(self.optimizers, values["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.state = State(**values["state"])

    def start_from(self, path: Path) -> None:
        """Train on from the weights of a training that is over, as a go of its own."""
        model, seen = load_trained(path, self.recipe, self.run.device)
        self.model.load_state_dict(model.state_dict())
        self.state = replace(seen, first_step=seen.step, first_s=seen.elapsed_s)

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

    def step(self, tokens: Tokens, loss_of: Loss) -> float:
        """Take one optimizer step on the next batch; its loss."""
        began, progress = time.monotonic(), self.state.progress(self.run)
        recipe, state = self.recipe, self.state
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate(progress)
        batch = windows(tokens, recipe.batch, recipe.length, self.run.seed, state.step)
        batch = batch.to(self.run.device)
        with self.run.autocast():
            logits = self.model(batch[:, :-1], use_cache=False).logits
        loss = loss_of(logits.float(), batch, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value: float = loss.item()
        state.step += 1
        state.tokens += batch[:, 1:].numel()
        state.elapsed_s += time.monotonic() - began
        return value

    def train(self, tokens: Tokens, loss_of: Loss) -> list[float]:
        """Train until the budget is spent, saving now and then; the losses of the steps."""
        name = "model" if self.checkpoint is None else self.checkpoint.stem
        saved_at, losses = self.state.elapsed_s, []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task(name, total=1.0)
            while (progress := self.state.progress(self.run)) < 1:
                losses.append(self.step(tokens, loss_of))
                line = f"{name} step {self.state.step} loss {losses[-1]:.3f}"
                bar.update(task, completed=progress, description=line)
                if not console.is_terminal and self.state.step % PRINT_EVERY_STEPS == 0:
                    console.print(f"{line} after {self.state.elapsed_s:.0f} s", highlight=False)
                if self.state.elapsed_s - saved_at > CHECKPOINT_EVERY_S:
                    self.save()
                    saved_at = self.state.elapsed_s
        self.save()
        return losses


def load_trained(path: Path, recipe: Recipe, device: str) -> tuple[LlamaForCausalLM, State]:
    """The model of a checkpoint, float32 and in evaluation mode, and how it was trained."""
    values = torch.load(path, map_location=device, weights_only=True)
    model = LlamaForCausalLM(recipe.config()).to(device)
    model.load_state_dict(values["model"])
    return model.eval(), State(**values["state"])


def faster_precision(recipe: Recipe, device: str, tokens: Tokens) -> str:
    """``fp32`` or ``bf16``, whichever takes three training steps in less time here."""
    seconds = {}
    for precision in ("fp32", "bf16"):
        trainer = Trainer(recipe, Run(steps=4, device=device, precision=precision), None)
        trainer.step(tokens, text_loss)
        warm_s = trainer.state.elapsed_s
        trainer.train(tokens, text_loss)
        seconds[precision] = trainer.state.elapsed_s - warm_s
    return min(seconds, key=lambda precision: seconds[precision])
