"""What of a head is traced, against what is written from its description; every form that differs silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.graph.tracing import taps
from outrider.export.graph.tracing.taps import Taps
from outrider.export.heads import model as modules
from outrider.export.heads import part as parts
from outrider.export.heads.checkpoint import HeadCheckpoint, open_head
from outrider.export.heads.model import NEVER, Inlet, build
from outrider.export.heads.part import HeadPart, export_part, target_features
from outrider.export.heads.reference import features_of, head_answers
from outrider.export.progress import Progress
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.export.heads.heads_models import HIDDEN, VOCAB, rewrite, write_head
from tests.mutants import assert_caught

NUM_TOKENS = 9
FORMS = {
    "as in the source": {},
    "residual of the normed feature": {"flags": ("norm_before_residual",)},
    "normed output recycled": {"flags": ("norm_output",)},
    "a norm per tap": {"flags": ("fc_norm",)},
    "a norm over all taps": {"flags": ("norm_before_fc",)},
    "Qwen 3's layer": {"layer": "qwen3", "dialect": "speculators"},
    "narrower than its target": {"target_hidden": 2 * HIDDEN},
    "all ids": {"num_ids": VOCAB},
}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip
TARGETS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def answers(head: HeadCheckpoint, streams: Tensor, tokens: Tensor) -> list[Tensor]:
    """Features, logits over the target's ids and recycled features of the modules that are traced."""
    inlet, own = build(head, VOCAB, torch.zeros(VOCAB, HIDDEN))
    with torch.no_grad():
        features = inlet(streams)
        own.features = features[None]
        logits = own(tokens[None], torch.arange(len(tokens))[None]).logits[0]
        assert own.recycled is not None
        return [features, logits, own.recycled[0]]


def expected(head: HeadCheckpoint, streams: Tensor, tokens: Tensor) -> list[Tensor]:
    """The same by the reference."""
    with torch.no_grad():
        features = features_of(head, list(streams.chunk(head.num_taps, dim=-1)))
        logits, recycled = head_answers(head, head.tensors["embed_tokens.weight"], features, tokens)
    everywhere = torch.full((len(tokens), VOCAB), NEVER)
    everywhere[:, slice(None) if head.target_ids is None else head.target_ids] = logits
    return [features, everywhere, recycled]


def given(head: HeadCheckpoint) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    streams = torch.randn(NUM_TOKENS, head.num_taps * head.target_hidden_size, generator=random)
    return streams, torch.randint(0, VOCAB, (NUM_TOKENS,), generator=random)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_answers_as_it_is_described(form: str, tmp_path: Path) -> None:
    head = open_head(write_head(tmp_path / "head", **FORMS[form]))
    for found, wanted in zip(
        answers(head, *given(head)), expected(head, *given(head)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_stretched_rotary_embedding_is_read(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    plain = open_head(write_head(tmp_path / "head"))
    wanted = expected(plain, *given(plain))[1]
    head = open_head(rewrite(tmp_path / "head", rope_scaling=scaling))
    found = answers(head, *given(head))[1]
    torch.testing.assert_close(found, expected(head, *given(head))[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flag_that_is_overlooked_changes_the_answer(flag: str, tmp_path: Path) -> None:
    """Trap: nothing else tells: the tensors of a head are the same with these flags and without."""
    head = open_head(write_head(tmp_path / "head", flags=(flag,)))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            answers(head, *given(head))[2],
            expected(replace(head, **{flag: False}), *given(head))[2],
        )


def random_target(kind: str) -> PreTrainedModel:
    config, model = TARGETS[kind]
    torch.manual_seed(3)
    return model(config(**SIZES)).eval()


def as_part(head: HeadCheckpoint, layers: tuple[int, ...]) -> HeadPart:
    inlet, own = build(head, VOCAB, torch.zeros(VOCAB, HIDDEN))
    embedding = head.tensors["embed_tokens.weight"]
    return HeadPart(checkpoint=head, taps=layers, embedding=embedding, inlet=inlet, own=own)


def tapped_as_transformers_says(kind: str, folder: Path) -> None:
    """Trap: off by one layer. Transformers' ``hidden_states[i]`` enters layer i."""
    part = as_part(open_head(write_head(folder / "head", flags=("fc_norm",))), (0, 2, 4))
    model, tokens = random_target(kind), torch.arange(NUM_TOKENS)
    wanted = target_features(part, model, tokens.numpy())
    seen = part.tapped()
    with torch.no_grad(), seen.inside(model):
        model(tokens[None], use_cache=False)
        found = seen.features()[0]
    torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-4, atol=1e-4)
    assert not any(one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize(("asked", "kind"), [("w8a8", "int8"), ("half", "float16")])
def test_weights_that_are_taken_in_place_of_others_are_told(
    asked: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "export_head",
        "compare_head",
        "_stored",
    ):  # seconds, and tested with whole bundles
        monkeypatch.setattr(parts, name, lambda *given, **named: {})
    told: list[str] = []
    head = as_part(open_head(write_head(tmp_path / "head")), (0, 1, 1))
    entry, _ = export_part(head, tmp_path / "bundle", asked, 128, Progress(told.append))
    assert entry.weights == kind
    assert f"draft: weights {asked} are not made of a head; {kind} are" in told


@pytest.mark.parametrize("kind", TARGETS)
def test_features_are_of_what_enters_the_named_layers(kind: str, tmp_path: Path) -> None:
    tapped_as_transformers_says(kind, tmp_path)


def test_layers_that_a_target_lacks_are_refused(tmp_path: Path) -> None:
    inlet = Inlet(open_head(write_head(tmp_path / "head")))
    with (
        pytest.raises(BundleError, match=r"what enters layer 5, the target has 0\.\.4"),
        Taps((0, 2, 5), inlet, HIDDEN).inside(random_target("llama")),
    ):
        pass
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=9))
    with Taps((0, 1, 1), inlet, HIDDEN).inside(gpt2):
        pass  # its layers have another name
    gpt2.transformer.other = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    with pytest.raises(BundleError, match="gpt2: no single list of its 2 layers"):
        taps.layers_of(gpt2)


MUTANTS = {
    "the layer after": (taps, "layers[layer].register", "layers[layer - 1].register", "llama"),
    "taps in another order": (
        taps, "for layer in self.layers], dim=-1", "for layer in self.layers[::-1]], dim=-1", "llama",
    ),
    "an embedding that is not normed": (
        modules, "layer.input_layernorm(self.embed_tokens(input_ids))", "self.embed_tokens(input_ids)", "",
    ),
    "another base of angles": (
        modules, "LlamaRotaryEmbedding(config)", "LlamaRotaryEmbedding(type(config)(head_dim=config.head_dim))", "",
    ),
    "the feature first": (modules, "[embedded, normed]", "[normed, embedded]", ""),
    "logits left in the head's own order": (
        modules, ".index_select(-1, self.places)", ".index_select(-1, self.places.sort().values)", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    module, old, new, kind = MUTANTS[name]

    def killer() -> None:
        folder = tmp_path_factory.mktemp("mutant")
        if kind:
            tapped_as_transformers_says(kind, folder)
        else:
            test_a_head_answers_as_it_is_described("as in the source", folder)

    assert_caught(monkeypatch, module, old, new, killer, (AssertionError, KeyError))
