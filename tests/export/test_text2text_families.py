"""Every family of encoder-decoder models exports without a line of its own, and answers as PyTorch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from outrider.engines.base import FloatArray, IntArray
from outrider.engines.bundle import encoder_decoder
from outrider.engines.bundle.names import past_names
from outrider.engines.onnx.session import open_session
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import ModelConfig, read_model_config
from transformers import PreTrainedModel

from tests.export.text2text_models import (
    FAMILIES,
    pytorch_logits,
    random_sources,
    random_text2text,
    random_texts,
)
from tests.gate import few_of

LENGTHS = np.array([37, 5, 18, 1])
SPANS = (1, 5, 2, 9, 3, 7)
# A bias by buckets and one by position; the others' variants are exported with --long.
ORDINARY = ("t5", "m2m_100")


class Slots:
    """Both graphs of a model over caches full of another request's leftovers."""

    def __init__(
        self, path: Path, model_config: ModelConfig, rows: IntArray, capacity: int, memory: int
    ) -> None:
        encode = path.with_name(encoder_decoder.ENCODE_FILE)
        self._decoder, self._encoder = (
            open_session(one, copies_caches=True) for one in (path, encode)
        )
        assert model_config.source is not None
        shape = (len(rows), model_config.num_kv_heads, capacity, model_config.head_size)
        self._texts = {
            name: np.full(shape, 7, np.float32) for name in past_names(model_config.num_layers)
        }
        names = encoder_decoder.cross_past_names(model_config.num_layers)
        shape = (len(rows), model_config.source.num_heads, memory, model_config.source.head_size)
        self._sources = {name: np.full(shape, 7, np.float32) for name in names}
        self._lengths = LENGTHS[rows]

    def read(self, sources: IntArray) -> dict[str, FloatArray]:
        feeds = {encoder_decoder.SOURCE: sources, encoder_decoder.SOURCE_LENGTH: self._lengths}
        names = [f"new_{name}" for name in self._sources]
        answers = self._encoder.run(names, feeds | self._sources)
        self._sources = dict(zip(self._sources, answers, strict=True))
        return self._sources

    def extend(self, tokens: IntArray, starts: IntArray) -> FloatArray:
        columns = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        feeds = {"tokens": tokens, "start": starts, "logit_positions": columns}
        feeds |= {encoder_decoder.SOURCE_LENGTH: self._lengths}
        names = ["logits", *(f"new_{name}" for name in self._texts)]
        logits, *caches = self._decoder.run(names, feeds | self._texts | self._sources)
        self._texts = dict(zip(self._texts, caches, strict=True))
        return logits


@pytest.mark.parametrize("family", few_of(FAMILIES, *ORDINARY))
def test_family_answers_as_pytorch_does(family: str, tmp_path: Path) -> None:
    model, path = random_text2text(family), tmp_path / "model.onnx"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_model(model, path, num_positions=120, num_source_positions=100)
    assert_unchanged(model, before)
    assert_answers_as_pytorch(model, path)
    assert_bits_depend_on_nothing_else(path, model)


def assert_answers_as_pytorch(model: PreTrainedModel, path: Path) -> None:
    """Ragged spans, each row rolled back to a place of its own after each."""
    sources, texts = random_sources(LENGTHS), random_texts(model, len(LENGTHS), 60)
    expected = pytorch_logits(model, sources, LENGTHS, texts)
    slots = Slots(path, read_model_config(model.config), np.arange(4), capacity=80, memory=48)
    slots.read(sources)
    starts = np.zeros(4, np.int64)
    tolerance = 1e-4 * max(1.0, float(np.abs(expected).max()) / 10)
    for num_tokens in SPANS:
        where = starts[:, None] + np.arange(num_tokens)
        found = slots.extend(np.take_along_axis(texts, where, 1), starts)
        wanted = np.take_along_axis(expected, where[:, :, None], 1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
        starts = starts + np.maximum(1, num_tokens - np.arange(4) % num_tokens)


def assert_bits_depend_on_nothing_else(path: Path, model: PreTrainedModel) -> None:
    """Rows alone, by other spans, in other capacities and paddings, against the same in one batch."""
    sources, texts = random_sources(LENGTHS), random_texts(model, len(LENGTHS), 24)

    def answers(
        rows: IntArray, sizes: tuple[int, int], num_tokens: int, width: int
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        slots = Slots(path, read_model_config(model.config), rows, *sizes)
        padded = np.zeros((len(rows), width), np.int64)
        kept = min(width, sources.shape[1])
        padded[:, :kept] = sources[rows, :kept]
        read = slots.read(padded)
        logits = [
            slots.extend(texts[rows, at : at + num_tokens], np.full(len(rows), at))
            for at in range(0, texts.shape[1], num_tokens)
        ]
        return np.concatenate(logits, axis=1), read

    together, read_together = answers(np.arange(4), (80, 48), 4, 37)
    for row, length in enumerate(LENGTHS):
        least = max(2, int(length))
        for sizes, num_tokens, width in [
            ((80, 48), 4, least),
            ((80, 48), 2, 37),
            ((128, 96), 8, 64),
            ((30, 37), 24, 37),
        ]:
            alone, read_alone = answers(np.array([row]), sizes, num_tokens, width)
            np.testing.assert_array_equal(alone[0], together[row])
            for name, value in read_alone.items():
                np.testing.assert_array_equal(
                    value[0, :, :length], read_together[name][row, :, :length]
                )
    singly, _ = answers(np.arange(4), (80, 48), 1, 37)
    np.testing.assert_array_equal(singly, together)


def assert_unchanged(model: PreTrainedModel, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.config._attn_implementation != "outrider_kv"
    assert not any("compute_bias" in vars(module) for module in model.modules())
