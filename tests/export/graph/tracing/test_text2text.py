"""Encoder-decoder models through the canonical modules, still in PyTorch: every family, and mistakes that must show."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.graph.tracing import encoder_decoder, kv_export, stack_tables
from outrider.export.graph.tracing.encoder_decoder import SourcedDecoder, SourceReader
from outrider.export.graph.tracing.kv_export import taken_over
from outrider.export.graph.tracing.stack_tables import by_tables
from outrider.export.model_config import read_model_config
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bart import modeling_bart
from transformers.models.t5 import modeling_t5

from tests.export.text2text_models import (
    FAMILIES,
    pytorch_logits,
    random_sources,
    random_text2text,
    random_texts,
)
from tests.mutants import assert_caught

LENGTHS = np.array([37, 5, 18, 1])
SPANS = (1, 5, 2, 9, 3, 7)
# Texts reach past the greatest distance, whose bucket no nearer one has.
NEAR = {"relative_attention_max_distance": 20}


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_of_every_family_have_the_logits_of_whole_texts(family: str) -> None:
    Texts(random_text2text(family)).check()


def test_a_model_is_given_back_as_it_was() -> None:
    for family in ("umt5", "bart"):
        model = random_text2text(family)
        modules = [(module, dict(vars(module))) for module in model.modules()]
        Texts(model).check()
        for module, held in modules:
            assert vars(module) == held


def test_biases_that_change_beyond_their_greatest_distance_are_refused() -> None:
    model = random_text2text("t5")
    module = model.decoder.block[0].layer[0].SelfAttention
    module.relative_attention_max_distance = 20
    table = module.relative_attention_bias
    module.compute_bias = lambda num_queries, num_keys, **_: (
        table.weight[torch.arange(num_keys).remainder(32)]
        .T[None, :, None]
        .expand(-1, -1, num_queries, -1)
    )
    with (
        pytest.raises(BundleError, match="relative_attention_max_distance"),
        by_tables(model.get_decoder(), 60),
    ):
        pass


@pytest.mark.parametrize(
    ("family", "module", "old", "new"),
    [
        # The head's scale and what is added behind the head.
        ("t5", modeling_t5, "sequence_output = sequence_output * (self.model_dim**-0.5)", "pass"),
        (
            "bart",
            modeling_bart,
            "lm_logits + self.final_logits_bias.to(lm_logits.device)",
            "lm_logits",
        ),
        # Positions that begin at an offset; where one row stands is not where another does.
        ("bart", stack_tables, "answers.append(answer)", "answers.append(embedding.weight[:60])"),
        (
            "bart",
            encoder_decoder,
            "span_positions(start, tokens,",
            "span_positions(0 * start, tokens,",
        ),
        # Biases that are one bucket short, of the query's column, or of the other direction.
        ("t5", stack_tables, "(module.relative_attention_max_distance)", "(19)"),
        ("t5", stack_tables, "places.keys - places.queries", "places.keys - 0 * places.queries"),
        ("t5", stack_tables, "before if module.is_causal", "after if module.is_causal"),
        # Texts that see what follows, sources that see their padding.
        ("bart", kv_export, 'getattr(module, "is_causal", True)', "False"),
        ("bart", kv_export, "attention_mask.reshape(-1)", "attention_mask.reshape(-1) + 1"),
        # What the encoder answered stands one column further.
        (
            "t5",
            encoder_decoder,
            "torch.zeros_like(source_length))",
            "torch.ones_like(source_length))",
        ),
    ],
)
def test_a_mistake_shows(
    family: str, module: ModuleType, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(random_text2text(family, **NEAR if family == "t5" else {}))
    assert_caught(monkeypatch, module, old, new, texts.check, (AssertionError, BundleError))


class Texts:
    """Texts of four rows whose sources differ in length, and what a model answers to all of each at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._sources = random_sources(LENGTHS)
        self._tokens = random_texts(model, len(LENGTHS), 60)
        self._expected = pytorch_logits(model, self._sources, LENGTHS, self._tokens)

    def check(self) -> None:
        """Ragged spans over used caches, each row rolled back to a place of its own after each."""
        starts = np.zeros(len(LENGTHS), np.int64)
        tolerance = 1e-4 * max(1.0, float(np.abs(self._expected).max()) / 10)
        with (
            torch.no_grad(),
            by_tables(self._model.get_decoder(), 60) as text,
            by_tables(self._model.get_encoder(), 60) as source,
            taken_over(self._model) as head,
        ):
            reader = SourceReader(self._model, head, source, text, max_source=60)
            lengths = torch.from_numpy(LENGTHS)
            cross = reader(torch.from_numpy(self._sources), lengths, *self._caches(48))
            decoder = SourcedDecoder(self._model, head, text, max_position=60)
            keys, values = self._caches(80)
            for num_tokens in SPANS:
                where = starts[:, None] + np.arange(num_tokens)
                answer, keys, values = decoder(
                    torch.from_numpy(np.take_along_axis(self._tokens, where, 1)),
                    torch.from_numpy(starts),
                    torch.arange(num_tokens).expand(len(LENGTHS), -1),
                    lengths,
                    keys,
                    values,
                    *cross,
                )
                wanted = np.take_along_axis(self._expected, where[:, :, None], 1)
                np.testing.assert_allclose(answer.numpy(), wanted, rtol=0, atol=tolerance)
                starts = starts + np.maximum(1, num_tokens - np.arange(4) % num_tokens)

    def _caches(self, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        model_config = read_model_config(self._model.config)
        shape = (len(LENGTHS), model_config.num_kv_heads, capacity, model_config.head_size)
        keys, values = (
            [torch.full(shape, 7.0) for _ in range(model_config.num_layers)] for _ in range(2)
        )
        return keys, values
