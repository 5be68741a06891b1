"""Sliding windows through the canonical decoder, still in PyTorch: they are Transformers' own, and mistakes show."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from outrider.engines.base import BundleError
from outrider.export.certificate.reference import reference_logits
from outrider.export.graph.to_onnx import export_model
from outrider.export.graph.tracing import kv_export, windows
from outrider.export.graph.tracing.kv_export import (
    CanonicalDecoder,
    UnsupportedAttentionError,
    taken_over,
)
from outrider.export.graph.tracing.windows import Windows, window_bias
from outrider.export.model_config import read_model_config
from transformers import PreTrainedModel
from transformers.masking_utils import sliding_window_overlay

from scripts.check_parity import random_model
from tests.mutants import assert_caught

NUM_POSITIONS = 48
SPANS = (1, 5, 17, 2, 9)
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def windowed(family: str) -> PreTrainedModel:
    """A model whose window is 6 tokens, of one layer or of all."""
    return random_model(
        family, NUM_POSITIONS, **(MIXED if "gemma" in family else {"sliding_window": 6})
    )


@pytest.mark.parametrize("window", [1, 2, 6, 40])
def test_a_window_hides_what_transformers_hides(window: int) -> None:
    queries, keys = torch.tensor([[0, 3, 7, 30], [9, 8, 39, 2]]), torch.arange(40)
    found = window_bias(queries, keys[None, None], window)
    is_seen = sliding_window_overlay(window)(0, 0, queries[:, None, :, None], keys)
    assert torch.equal(found == 0, is_seen)
    assert torch.equal(found == -float("inf"), ~is_seen)


class Texts:
    """Texts of three rows, and what a model answers to all of each at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._model_config = read_model_config(model.config)
        rng = np.random.default_rng(4)
        self._tokens = rng.integers(0, self._model_config.vocab_size, (3, NUM_POSITIONS))
        self._expected = reference_logits(model, self._tokens)

    def check(self, num_positions: int = NUM_POSITIONS) -> Windows:
        """Ragged spans over used caches, each row rolled back to a place of its own after each."""
        starts, seen = np.zeros(3, np.int64), Windows(num_positions)
        keys, values = self._caches(), self._caches()
        with torch.no_grad(), taken_over(self._model, seen) as head:
            decoder = CanonicalDecoder(self._model, head, seen, max_position=NUM_POSITIONS)
            for num_tokens in SPANS:
                where = starts[:, None] + np.arange(num_tokens)
                answer, keys, values = decoder(
                    torch.from_numpy(np.take_along_axis(self._tokens, where, 1)),
                    torch.from_numpy(starts),
                    torch.arange(num_tokens).expand(3, -1),
                    keys,
                    values,
                )
                expected = np.take_along_axis(self._expected, where[:, :, None], 1)
                np.testing.assert_allclose(answer.numpy(), expected, rtol=0, atol=1e-4)
                starts = starts + num_tokens - np.arange(3) % num_tokens
        return seen

    def _caches(self) -> list[torch.Tensor]:
        shape = 3, self._model_config.num_kv_heads, NUM_POSITIONS, self._model_config.head_size
        return [torch.full(shape, 7.0) for _ in range(self._model_config.num_layers)]


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3_text"])
def test_spans_have_the_logits_of_whole_texts(family: str) -> None:
    assert Texts(windowed(family)).check().found == {6}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (windows, "queries[:, None, :, None] - window", "queries[:, None, :, None] - window - 1"),
        (windows, "queries[:, None, :, None] - window", "queries[:, None, :, None] - window + 1"),
        (windows, "self._span = positions, cache", "self._span = positions * 0, cache"),
        (kv_export, "_sum(position_bias, windows.bias(sliding_window))", "position_bias"),
    ],
)
def test_a_mistake_shows(
    module: ModuleType, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(windowed("gemma2"))
    assert_caught(monkeypatch, module, old, new, texts.check)


def test_a_window_that_no_position_leaves_makes_no_bias() -> None:
    seen = Windows(num_positions=6)
    assert seen.bias(6) is None
    assert seen.bias(None) is None
    assert not seen.found


def test_layers_that_share_a_window_share_its_bias() -> None:
    seen = Windows(num_positions=8)
    seen.begin(torch.tensor([[3, 4]]), torch.zeros(1, 1, 8, 2))
    assert seen.bias(2) is seen.bias(2)
    assert not torch.equal(seen.bias(2), seen.bias(3))


def test_a_window_that_the_configuration_does_not_name_is_refused(tmp_path: Path) -> None:
    model = windowed("gemma2")
    model.model.layers[0].self_attn.sliding_window = 5
    with pytest.raises(
        BundleError, match=r"target: layers .* windows of \[5\] tokens.* says \[6\]"
    ):
        export_model(model, tmp_path / "target" / "model.onnx")


def test_a_window_beside_a_source_is_refused() -> None:
    model = windowed("mistral")
    with taken_over(model), pytest.raises(UnsupportedAttentionError, match="beside a source"):
        model(
            input_ids=torch.ones(1, 2, dtype=torch.int64),
            attention_mask=torch.tensor([2]).reshape(1, 1, 1, 1),
        )
