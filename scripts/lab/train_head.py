"""Train an EAGLE-3 head for a small target on what the target answers itself, for so many minutes on a CPU.

    python -m scripts.lab.train_head TARGET BUNDLE --prompts FILE --out FOLDER --minutes 10

For tests of what serves heads, and for a first impression: a good head takes a day of a large GPU. ``BUNDLE`` is any
bundle of the target; every eighth prompt is held out, and how often the head's likeliest token is the target's is told
for each place of a draft. The folder is in the dialect of ``speculators`` (``outrider.export.heads.checkpoint``).

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.2: a head learns on its own features too. Here they stand
in for the target's at all places before, too, which needs no mask of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from outrider.engines.sampling.base import SamplingParams
from outrider.export.checkpoint import open_checkpoint
from outrider.export.graph.tracing.taps import Taps, layers_of
from outrider.export.heads.checkpoint import HeadCheckpoint
from outrider.export.heads.model import Head, Inlet
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.prompts import encode_prompts, read_prompts
from outrider.runtime.offline.rig import RigOptions, open_rig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

HELD_OUT = 8
STEPS = 3
"""Of a draft that a head learns; it learns a later one at ``FADING`` of the weight."""
FADING = 0.8
BEST = 32
"""Tokens of the target's distribution that are learnt from."""
ROWS, RATE = 8, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt with its answer, as the target read it.

    Attributes:
        tokens: [n] int64.
        num_prompt: of them.
        streams: [n, taps * hidden] float16.
        best: [n, BEST] int64, the likeliest tokens behind each.
        probs: [n, BEST] float32, of these.
    """

    tokens: Tensor
    num_prompt: int
    streams: Tensor
    best: Tensor
    probs: Tensor


def answers(bundle: Path, prompts: Path, num_tokens: int, num_rounds: int) -> list[list[list[int]]]:
    """Return the target's answers by prompt, greedy and sampled ones: the prompt's length, the prompt, the answer."""
    rig = open_rig(bundle, RigOptions(max_batch=8, num_threads=1))
    asked = encode_prompts(
        read_prompts(prompts), rig.tokenizer, max_tokens=num_tokens, manifest=rig.bundle.manifest
    )
    plain, found = SpeculationParams(drafter="none", gamma=0), []
    ends = rig.bundle.manifest.eos_token_ids
    for number in range(num_rounds):
        params = SamplingParams(temperature=min(1.0, float(number)), end_token_ids=ends)
        rows = []
        for first in range(0, len(asked), ROWS):
            group, seed = asked[first : first + ROWS], 10_000 * number + first
            given, _ = rig.answer(group, params, plain, num_tokens, first_seed=seed)
            pairs = zip(group, given, strict=True)
            rows += [[len(one.tokens), *one.tokens, *answer.tokens] for one, answer in pairs]
        found.append(rows)
    rig.close()
    return [list(group) for group in zip(*found, strict=True)]


def read_texts(
    model: PreTrainedModel, taps: Sequence[int], rows: Sequence[list[int]]
) -> list[Text]:
    """Return what a target computes of texts, each given with the length of its prompt first."""
    seen = Taps(taps, nn.Identity(), 2)
    found = []
    with torch.no_grad(), seen.inside(model):
        for num_prompt, *row in rows:
            tokens = torch.tensor(row)
            logits = model(tokens[None], use_cache=False).logits[0].float()
            best = logits.topk(BEST)
            found.append(
                Text(
                    tokens=tokens,
                    num_prompt=num_prompt,
                    streams=seen.features()[0].half(),
                    best=best.indices,
                    probs=torch.exp(best.values - logits.logsumexp(-1, keepdim=True)),
                )
            )
    return found


def new_head(
    model: PreTrainedModel, ids: Tensor, taps: tuple[int, ...]
) -> tuple[HeadCheckpoint, Inlet, Head]:
    """Return a head that begins as the target's last layer on its last tap, with the rows of its projection."""
    base, size = model.config, model.config.hidden_size
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=size, intermediate_size=base.intermediate_size,
        num_hidden_layers=1, num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads, head_dim=base.head_dim,
        rms_norm_eps=base.rms_norm_eps, rope_parameters=dict(base.rope_parameters),
        max_position_embeddings=base.max_position_embeddings,
    )  # fmt: skip
    checkpoint = HeadCheckpoint(
        name="new", config=config, taps=taps, target_hidden_size=size, norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False,
        tensors={"fc.weight": torch.zeros(size, len(taps) * size)}, target_ids=None,
    )  # fmt: skip
    inlet, own = Inlet(checkpoint), Head(checkpoint, base.vocab_size)
    last, layer = layers_of(model)[-1], own.layer
    with torch.no_grad():
        inlet.fc.weight.zero_()
        inlet.fc.weight[:, -size:] = torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = getattr(layer.self_attn, name).weight
            wide[:, :size].mul_(0.1)
            wide[:, size:] = getattr(last.self_attn, name).weight
        layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        layer.mlp.load_state_dict(last.mlp.state_dict())
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        own.norm.load_state_dict(model.base_model.norm.state_dict())
        own.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        own.lm_head.projection.weight.copy_(model.get_output_embeddings().weight[ids])
    own.embed_tokens.requires_grad_(False)
    own.lm_head.requires_grad_(False)
    return checkpoint, inlet.float(), own.float()


def drafts(inlet: Inlet, own: Head, streams: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return logits [B, n - 1, V_draft] of each step of a draft; row t is of the token behind token t + 1."""
    features, found = inlet(streams.float())[:, :-1], []
    places = torch.arange(tokens.shape[1] - 1)[None]
    for _ in range(STEPS):
        own.features = features
        found.append(own(tokens[:, 1:], places).logits)
        assert own.recycled is not None
        features = torch.cat([features[:, :1], own.recycled[:, :-1]], dim=1)
    return found


def padded(texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return streams, tokens, likeliest tokens, their probabilities, and whether a place is of an answer."""
    longest = max(len(text.tokens) for text in texts)

    def pad(values: Tensor) -> Tensor:
        return nn.functional.pad(values, (0,) * (2 * values.ndim - 1) + (longest - len(values),))

    columns = [(one.streams, one.tokens, one.best, one.probs) for one in texts]
    streams, tokens, best, probs = (
        torch.stack([pad(values) for values in column]) for column in zip(*columns, strict=True)
    )
    places = torch.arange(longest - 1)[None] + 1
    starts = torch.tensor([[one.num_prompt - 1] for one in texts])
    ends = torch.tensor([[len(one.tokens)] for one in texts])
    return streams, tokens, best[:, 1:], probs[:, 1:], (places >= starts) & (places < ends)


def loss_of(
    logits: Sequence[Tensor], best: Tensor, probs: Tensor, is_answer: Tensor, places: Tensor
) -> tuple[Tensor, list[float]]:
    """Return the cross entropy with the target's distribution, and the share of greedy choices that agree by step."""
    at = places[best]
    known = (at < logits[0].shape[-1]) * probs
    at = at.clamp(max=logits[0].shape[-1] - 1)
    total, agreed = torch.zeros(()), []
    for step, one in enumerate(logits):
        # A row of step s has seen s features of its own.
        counted = is_answer.clone()
        counted[:, :step] = False
        missed = -(known * one.log_softmax(-1).gather(-1, at)).sum(-1)
        total = total + FADING**step * missed[counted].mean()
        is_equal = (one.argmax(-1) == at[..., 0]) & (known[..., 0] > 0)
        agreed.append(float(is_equal[counted].float().mean()))
    return total, agreed


def train(
    inlet: Inlet, own: Head, texts: Sequence[Sequence[Text]], places: Tensor, minutes: float
) -> tuple[int, list[float]]:
    """Train on most prompts' texts for so many minutes; return tokens read, and what agrees on those held out."""
    held = [one for index, group in enumerate(texts) for one in group if index % HELD_OUT == 0]
    rest = [one for index, group in enumerate(texts) for one in group if index % HELD_OUT]
    weights = [one for one in (*inlet.parameters(), *own.parameters()) if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    began, seen, generator = time.monotonic(), 0, torch.Generator().manual_seed(0)
    while (gone := (time.monotonic() - began) / (60 * minutes)) < 1.0:
        chosen = torch.randperm(len(rest), generator=generator)[:ROWS].tolist()
        streams, tokens, best, probs, is_answer = padded([rest[index] for index in chosen])
        loss, agreed = loss_of(drafts(inlet, own, streams, tokens), best, probs, is_answer, places)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, 20 * gone + 0.05) * (1 - gone)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        seen += int(is_answer.sum())
        print(f"{gone:.2f} {seen} {float(loss):.3f} {[f'{one:.2f}' for one in agreed]}", flush=True)
    totals = torch.zeros(STEPS)
    with torch.no_grad():
        for first in range(0, len(held), ROWS):
            given = held[first : first + ROWS]
            streams, tokens, best, probs, is_answer = padded(given)
            found = loss_of(drafts(inlet, own, streams, tokens), best, probs, is_answer, places)[1]
            totals += torch.tensor(found) * len(given)
    return seen, (totals / len(held)).tolist()


def save(
    folder: Path, checkpoint: HeadCheckpoint, inlet: Inlet, own: Head, ids: Tensor, size: int
) -> None:
    """Write a head in the dialect of ``speculators``, without the target's embedding."""
    tensors = {**inlet.state_dict(), **own.state_dict()}
    del tensors["embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors.pop("lm_head.projection.weight")
    tensors = {re.sub(r"^layer\.", "layers.0.", name): one for name, one in tensors.items()}
    marked = torch.zeros(size, dtype=torch.bool)
    marked[ids] = True
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    folder.mkdir(parents=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    fields = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(checkpoint.taps or ()),
        "transformer_layer_config": checkpoint.config.to_dict(),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, default=str) + "\n")


def main() -> None:
    """Answer, read, train, tell and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training alone")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers to each prompt")
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    answered = answers(asked.bundle, asked.prompts, asked.tokens, asked.rounds)
    model = open_checkpoint(asked.target, max_context=None).load_as(torch.float32)
    num_layers = model.config.num_hidden_layers
    taps = (2, num_layers // 2, num_layers - 3)
    texts = [read_texts(model, taps, group) for group in answered]
    every = [one for group in texts for one in group]
    counts = torch.bincount(
        torch.cat([one.best[one.num_prompt - 1 :, :4].flatten() for one in every]),
        minlength=model.config.vocab_size,
    )
    ids = counts.argsort(descending=True, stable=True)[: asked.draft_vocabulary].sort().values
    places = torch.full((model.config.vocab_size,), len(ids)).scatter(
        0, ids, torch.arange(len(ids))
    )
    print(
        f"{len(every)} texts of {sum(len(one.tokens) for one in every)} tokens, {len(ids)} ids",
        flush=True,
    )
    checkpoint, inlet, own = new_head(model, ids, taps)
    seen, agreed = train(inlet, own, texts, places, asked.minutes)
    print(f"read {seen} tokens of answers; held out, greedy choices agree by place: {agreed}")
    save(asked.out, checkpoint, inlet, own, ids, model.config.vocab_size)


if __name__ == "__main__":
    main()
