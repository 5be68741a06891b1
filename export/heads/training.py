"""Training of an EAGLE-3 head on what its target answers itself, in a folder that a killed run goes on with.

A head begins as the target's last layer on its last tap, with rows of the target's projection, which stay as they are;
so does the embedding. It learns on its own features too, ``STEPS`` steps of a draft. In these its own features stand in
for the target's at all places before, too, which needs no mask of its own.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.2. The loss is cross entropy that gives way to total
variation as the overlap alpha of both distributions grows, with weight exp(-3 alpha).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from outrider.export.checkpoint import Checkpoint
from outrider.export.graph.tracing.taps import layers_of
from outrider.export.heads.checkpoint import HeadCheckpoint
from outrider.export.heads.model import Head, Inlet
from outrider.export.heads.texts import Batch, Text, batch_of
from outrider.runtime.oracle.analysis import Interval, ratio_interval
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

STEPS = 3
"""Of a draft that a head learns; it learns a later one at ``FADING`` of the weight."""
FADING = 0.8
JUDGED = 4
"""Steps of a draft that are judged."""
ROWS, RATE = 8, 1e-3
TENTHS, CONSTANT = 10, 8
"""Parts of the time; after ``CONSTANT`` of them, or when a part brought little for certain, the rate falls to 0 in the
others."""
LEAST_GAIN = 0.01
"""Of alpha_1 by a part of the time, below which that is little. Few held-out texts are certain of nothing: of 5, the
interval of a gain of .026 held 0."""
_STATE = "training.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How much of drafts behind held-out texts would be kept, by text and step of a draft; greedy or sampled texts.

    Attributes:
        is_greedy: [n] bool.
        num_places: [n] drafts that begin in each.
        kept: [n, JUDGED] sums over them of the chance that a token is kept whose predecessors were.
        chains: likewise, of the chance that the token and all before it in the draft are.
    """

    is_greedy: np.ndarray
    num_places: np.ndarray
    kept: np.ndarray
    chains: np.ndarray

    def alphas(self, *, is_greedy: bool) -> list[tuple[float, Interval | None]]:
        """Return alpha_1, alpha_2, ... with their intervals."""
        which = self.is_greedy == is_greedy
        places, kept = self.num_places[which], self.kept[which]
        return [
            (
                float(kept[:, step].sum() / max(1, places.sum())),
                ratio_interval(kept[:, step], places),
            )
            for step in range(JUDGED)
        ]

    def tokens_per_pass(self, gamma: int, *, is_greedy: bool) -> tuple[float, Interval | None]:
        """Return the tokens of a pass at gamma, 1..JUDGED, with their interval."""
        which = self.is_greedy == is_greedy
        places = self.num_places[which]
        tokens = places + self.chains[which, :gamma].sum(axis=1)
        return float(tokens.sum() / max(1, places.sum())), ratio_interval(tokens, places)

    def gain_over(self, before: HeldOut) -> Interval | None:
        """Return the interval of what alpha_1 has gained."""
        return ratio_interval(self.kept[:, 0] - before.kept[:, 0], self.num_places)


@dataclass(slots=True)
class Training:
    """A head that is being trained.

    Attributes:
        target: which it drafts for.
        num_done: tenths of the time.
        seen: tokens of answers, each as often as it was read.
        judged: after each tenth of the time, with ``seen``.
    """

    checkpoint: HeadCheckpoint
    inlet: Inlet
    own: Head
    target: PreTrainedModel
    num_done: int = 0
    seen: int = 0
    judged: list[tuple[int, HeldOut]] = field(default_factory=list)

    def weights(self) -> list[nn.Parameter]:
        """Return what is learnt."""
        return [
            one for one in (*self.inlet.parameters(), *self.own.parameters()) if one.requires_grad
        ]

    def expected(self) -> float | None:
        """Return alpha_1 at the end of the time by a - b / sqrt(tokens) through the judgements so far; None for few."""
        if len(self.judged) < 3:
            return None
        seen = np.array([count for count, _ in self.judged], dtype=np.float64)
        found = [one.kept[:, 0].sum() / one.num_places.sum() for _, one in self.judged]
        last, slope = np.polyfit(seen**-0.5, found, 1)[::-1]
        return float(last + slope * (seen[-1] * TENTHS / self.num_done) ** -0.5)


def new_head(model: PreTrainedModel, ids: Tensor) -> tuple[HeadCheckpoint, Inlet, Head]:
    """Return an untrained head for a target, of these ids [V_draft] int64."""
    taps = taps_of(model)
    base, size = model.config.get_text_config(decoder=True), model.config.hidden_size
    rope = dict(getattr(base, "rope_parameters", None) or {})
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=size, intermediate_size=base.intermediate_size,
        num_hidden_layers=1, num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads, rms_norm_eps=base.rms_norm_eps,
        head_dim=getattr(base, "head_dim", None) or size // base.num_attention_heads,
        rope_parameters=rope if "rope_theta" in rope else None,
        max_position_embeddings=base.max_position_embeddings,
    )  # fmt: skip
    checkpoint = HeadCheckpoint(
        name="new", config=config, taps=taps, target_hidden_size=size, norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False,
        tensors={"fc.weight": torch.zeros(size, len(taps) * size)}, target_ids=ids,
    )  # fmt: skip
    torch.manual_seed(0)
    inlet, own = Inlet(checkpoint).float(), Head(checkpoint, base.vocab_size).float()
    last, layer = layers_of(model)[-1], own.layer
    with torch.no_grad():
        inlet.fc.weight.zero_()
        inlet.fc.weight[:, -size:] = torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = getattr(layer.self_attn, name).weight
            wide[:, :size].mul_(0.1)
            _copy(wide[:, size:], getattr(last.self_attn, name).weight)
        _copy(layer.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(layer.mlp, name).weight, getattr(last.mlp, name).weight)
        _copy(layer.hidden_norm.weight, last.input_layernorm.weight)
        _copy(layer.post_attention_layernorm.weight, last.post_attention_layernorm.weight)
        _copy(own.norm.weight, model.base_model.norm.weight)
        _copy(own.embed_tokens.weight, model.get_input_embeddings().weight)
        _copy(own.lm_head.weight, model.get_output_embeddings().weight[ids])
    return checkpoint, inlet, own


def _copy(to: Tensor, value: Tensor) -> None:
    """Copy weights where they fit; what a target has in another shape begins at random."""
    if to.shape == value.shape:
        to.copy_(value)


def save_head(
    folder: Path, checkpoint: HeadCheckpoint, inlet: Inlet, own: Head, target: PreTrainedModel
) -> None:
    """Write a head in the dialect of ``speculators``, without the target's embedding; over an older one."""
    ids = checkpoint.target_ids
    assert ids is not None, "a head that is trained has ids of its own"
    tensors = {**inlet.state_dict(), **own.state_dict()}
    del tensors["embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors.pop("lm_head.projection.weight")
    tensors = {re.sub(r"^layer\.", "layers.0.", name): one for name, one in tensors.items()}
    marked = torch.zeros(own.embed_tokens.num_embeddings, dtype=torch.bool)
    marked[ids] = True
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(ids),
        "target_hidden_size": checkpoint.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(checkpoint.taps or ()),
        "transformer_layer_config": checkpoint.config.to_dict(),
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {
                "name_or_path": target.config.name_or_path,
                "architectures": list(target.config.architectures or ()),
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, default=str) + "\n")


def teacher(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return a target as it is learnt from, in float32.

    Raises:
        BundleError: its weights cannot be read.
    """
    return checkpoint.decoder_of(checkpoint.load_as(torch.float32))


def taps_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the layers whose inputs a new head reads."""
    num_layers = len(layers_of(model))
    return min(2, num_layers - 1), num_layers // 2, max(0, num_layers - 3)


def save_untrained(model: PreTrainedModel, num_ids: int, folder: Path) -> None:
    """Write a head of a target that has learnt nothing: what it costs is what a trained one costs."""
    ids = torch.arange(min(num_ids, model.config.vocab_size))
    save_head(folder, *new_head(model, ids), model)


def begin(model: PreTrainedModel, ids: Tensor, folder: Path) -> Training:
    """Return a head to train, as far as an earlier run in this folder came; of an untrained one its ids are ``ids``."""
    state: Mapping[str, Any] = {}
    if (file := folder / _STATE).exists():
        state = torch.load(file, weights_only=True)
        ids = state["ids"]
    checkpoint, inlet, own = new_head(model, ids)
    training = Training(checkpoint, inlet, own, model)
    if state:
        inlet.load_state_dict(state["inlet"])
        own.load_state_dict(state["own"])
        training.num_done, training.seen = state["num_done"], state["seen"]
        for seen, one in state["judged"]:
            arrays = {name: values.numpy() for name, values in one.items()}
            training.judged.append((seen, HeldOut(**arrays)))
    own.embed_tokens.requires_grad_(False)
    own.lm_head.requires_grad_(False)
    return training


def train(
    training: Training,
    texts: Sequence[Text],
    folder: Path,
    *,
    seconds: float,
    report: Callable[[Training], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train for so many seconds, of which an earlier run in this folder has used some; ``folder/head`` is the head.

    Args:
        training: which ``begin`` gave for the folder.
        texts: to learn from, and those held out to judge by.
        folder: whose files are written after each tenth of the time.
        seconds: in all.
        report: called after each tenth.
        clock: seconds.
    """
    learnt = [one for one in texts if not one.lesson.is_held_out]
    held = [one for one in texts if one.lesson.is_held_out]
    optimizer = torch.optim.AdamW(training.weights(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    if (folder / _STATE).exists():
        optimizer.load_state_dict(torch.load(folder / _STATE, weights_only=True)["optimizer"])
    while training.num_done < TENTHS:
        _train_part(training, optimizer, learnt, seconds / TENTHS, clock)
        training.num_done += 1
        training.judged.append((training.seen, judge(training, held)))
        if training.num_done < CONSTANT and _has_settled(training):
            training.num_done = CONSTANT
        save_head(
            folder / "head", training.checkpoint, training.inlet, training.own, training.target
        )
        _save_state(training, optimizer, folder)
        report(training)


def _has_settled(training: Training) -> bool:
    """Return whether the last tenth has certainly gained less than ``LEAST_GAIN``."""
    judged = [one for _, one in training.judged]
    if len(judged) < 2:
        return False
    gain = judged[-1].gain_over(judged[-2])
    return gain is not None and gain[1] < LEAST_GAIN


def _save_state(training: Training, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {
        "inlet": training.inlet.state_dict(),
        "own": training.own.state_dict(),
        "ids": training.checkpoint.target_ids,
        "optimizer": optimizer.state_dict(),
        "num_done": training.num_done,
        "seen": training.seen,
        "judged": [
            (seen, {name: torch.from_numpy(values) for name, values in asdict(one).items()})
            for seen, one in training.judged
        ],
    }
    unfinished = folder / f"{_STATE}.new"
    torch.save(state, unfinished)
    unfinished.rename(folder / _STATE)


def _train_part(
    training: Training,
    optimizer: torch.optim.Optimizer,
    texts: Sequence[Text],
    seconds: float,
    clock: Callable[[], float],
) -> None:
    """Train for one tenth of the time, one batch at least."""
    weights, done = training.weights(), training.num_done
    generator = torch.Generator().manual_seed(done)
    began, gone = clock(), 0.0
    while gone < 1.0:
        warm = min(1.0, 0.05 + 5 * gone) if done == 0 else 1.0
        left = (TENTHS - done - gone) / (TENTHS - CONSTANT)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * min(1.0, left)
        chosen = torch.randperm(len(texts), generator=generator)[:ROWS].tolist()
        batch = batch_of([texts[index] for index in chosen])
        loss = _loss(training, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        training.seen += int(batch.is_answer.sum())
        gone = (clock() - began) / seconds


def _drafts(training: Training, batch: Batch, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return by step of a draft which rows have one, [B, n - 1] bool, and log probabilities [rows, V_draft] there.

    Row t is of the token behind token t + 1; a row of step s has seen s features of the head's own.
    """
    own, found = training.own, []
    features = training.inlet(batch.streams.float())[:, :-1]
    places = torch.arange(batch.tokens.shape[1] - 1)[None]
    projection, own.lm_head = own.lm_head, nn.Identity()
    try:
        for step in range(num_steps):
            is_drafted = batch.is_answer.clone()
            # The first row of an answer may be the first of a draft only.
            for _ in range(step):
                is_drafted[:, 1:] &= is_drafted[:, :-1].clone()
                is_drafted[:, 0] = False
            own.features = features
            hidden = own(batch.tokens[:, 1:], places).logits
            found.append((is_drafted, projection.projection(hidden[is_drafted]).log_softmax(-1)))
            assert own.recycled is not None
            features = torch.cat([features[:, :1], own.recycled[:, :-1]], dim=1)
    finally:
        own.lm_head = projection
    return found


def _known(training: Training, batch: Batch, is_drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Return draft ids [rows, BEST] of the target's likeliest tokens, and their probabilities, 0 for those without."""
    places = training.own.lm_head.places
    assert isinstance(places, Tensor)
    num_ids = training.checkpoint.config.vocab_size
    ids = places[batch.best[is_drafted]]
    return ids.clamp(max=num_ids - 1), (ids < num_ids) * batch.probs[is_drafted]


def _loss(training: Training, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for step, (is_drafted, logprobs) in enumerate(_drafts(training, batch, STEPS)):
        if not len(logprobs):
            continue
        ids, probs = _known(training, batch, is_drafted)
        mine = logprobs.gather(-1, ids)
        overlap = torch.minimum(mine.exp(), probs).sum(-1)
        share = torch.exp(-3.0 * overlap.detach())
        missed = share * -(probs * mine).sum(-1) + (1 - share) * (1 - overlap)
        total = total + FADING**step * missed.mean()
    return total


def judge(training: Training, texts: Sequence[Text]) -> HeldOut:
    """Return how much of drafts behind texts would be kept: by equal choices where they are greedy, else by overlap."""
    rows = []
    with torch.no_grad():
        for text in texts:
            batch, kept = batch_of([text]), []
            for is_drafted, logprobs in _drafts(training, batch, JUDGED):
                ids, probs = _known(training, batch, is_drafted)
                if text.lesson.is_greedy:
                    found = (logprobs.argmax(-1) == ids[:, 0]) & (probs[:, 0] > 0)
                else:
                    found = torch.minimum(logprobs.gather(-1, ids).exp(), probs).sum(-1)
                kept.append(found.double().numpy())
            # Row i of step s belongs to the draft that begins at row i of step 0.
            count = len(kept[-1])
            each = np.stack([one[:count] for one in kept], axis=1).reshape(count, JUDGED)
            rows.append((count, each.sum(axis=0), each.cumprod(axis=1).sum(axis=0)))
    places, kept_sums, chains = zip(*rows, strict=True)
    return HeldOut(
        is_greedy=np.array([text.lesson.is_greedy for text in texts]),
        num_places=np.array(places),
        kept=np.array(kept_sums),
        chains=np.array(chains),
    )
