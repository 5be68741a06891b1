"""The graphs made for TensorRT of models with an encoder answer as the canonical ones; its parser understands them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from outrider.engines.base import EngineError, FloatArray
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE, SOURCE, SOURCE_LENGTH
from outrider.engines.onnx.session import open_session
from outrider.export.accelerators.tensorrt import graph
from outrider.export.accelerators.tensorrt.graph import derive_graph, derive_read_graph
from outrider.export.accelerators.tensorrt.network import (
    cache_updates,
    check_network,
    source_updates,
)
from outrider.export.graph.attention_kinds import LENGTHS as LENGTHS_INPUT

from tests.export.accelerators.tensorrt.test_graph import facts_of
from tests.export.conftest import Exported
from tests.mutants import assert_caught

CAPACITY, SOURCE_CAPACITY = 24, 32
LENGTHS = np.array([9, 1, 17])
KINDS = {"float32": np.float32, "float16": np.float16}
# Largest |difference| of logits, which reach 25 in T5.
TOLERANCES = {"float32": 1e-4, "float16": 0.15}


def derived(exported: Exported, folder: Path, precision: str) -> tuple[Path, Path]:
    """The graphs that read and that answer."""
    read, answer = folder / "read.onnx", folder / "answer.onnx"
    source = exported.path.with_name(ENCODE_FILE)
    num = derive_read_graph(source, read, capacity=SOURCE_CAPACITY, precision=precision)
    assert exported.model_config.source is not None
    assert num == exported.model_config.source.num_layers
    sizes = {"capacity": CAPACITY, "source_capacity": SOURCE_CAPACITY}
    derive_graph(exported.path, answer, precision=precision, **sizes)
    return read, answer


def answers(read: Path, answer: Path, kind: Any = np.float32) -> FloatArray:
    """Logits of ragged spans that answer ragged sources, over caches that hold noise beyond what is valid."""
    rng = np.random.default_rng(5)
    feeds: dict[str, Any] = {
        SOURCE: rng.integers(1, 90, (3, LENGTHS.max())),
        SOURCE_LENGTH: LENGTHS,
        "tokens": rng.integers(1, 90, (3, 5)),
        "start": np.zeros(3, np.int64),
        "logit_positions": np.tile(np.arange(5), (3, 1)),
    }
    for path in (read, answer):
        session = open_session(path, copies_caches=True)
        given = {}
        for value in session.get_inputs():
            if value.name not in feeds:
                is_source = value.name.startswith("cross_")
                size = SOURCE_CAPACITY if is_source else CAPACITY
                noise = rng.normal(size=(3, value.shape[1], size, value.shape[3]))
                feeds[value.name] = noise.astype(np.float32)
            array = feeds[value.name]
            given[value.name] = array.astype(kind) if array.dtype == np.float32 else array
        names = [value.name for value in session.get_outputs()]
        found = dict(zip(names, session.run(names, given), strict=True))
        feeds |= {
            name.removeprefix("new_"): made.astype(np.float32) for name, made in found.items()
        }
    logits: FloatArray = found["logits"]
    return logits


@pytest.mark.parametrize("precision", KINDS)
def test_derived_graphs_answer_as_the_canonical_ones(
    text2text: Exported, precision: str, tmp_path: Path
) -> None:
    expected = answers(text2text.path.with_name(ENCODE_FILE), text2text.path)
    found = answers(*derived(text2text, tmp_path, precision), KINDS[precision])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES[precision])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('_constant(graph, f"{name}.one_column", 1)', '_constant(graph, f"{name}.one_column", 0)'),
        ('_constant(graph, f"{name}.one_column", 1)', '_constant(graph, f"{name}.one_column", 2)'),
        ("    _mask_encoder(model.graph)\n", ""),
    ],
    ids=["one column more", "one column less", "no mask within a source"],
)
def test_a_mask_that_ends_elsewhere_is_caught(
    text2text: Exported, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(text2text.path.with_name(ENCODE_FILE), text2text.path)

    def kill() -> None:
        read, answer = derived(text2text, tmp_path, "float32")
        np.testing.assert_allclose(answers(read, answer), expected, rtol=0, atol=1e-4)
        # The parser drops lengths without a word.
        nodes = onnx.load(read, load_external_data=False).graph.node
        assert all(
            len(node.input) <= LENGTHS_INPUT for node in nodes if node.op_type == "Attention"
        )

    assert_caught(monkeypatch, graph, old, new, kill)


def test_every_attention_has_a_mask_and_every_cache_that_is_written_an_update(
    text2text: Exported, tmp_path: Path
) -> None:
    num_layers = text2text.model_config.num_layers
    read, answer = map(facts_of, derived(text2text, tmp_path, "float16"))
    check_network(read, len(read.attentions), source_updates(num_layers))
    check_network(answer, 2 * num_layers, cache_updates(num_layers))
    last = sorted(one.mask_shape[3] for one in answer.attentions if one.mask_shape is not None)
    assert last == [CAPACITY] * num_layers + [SOURCE_CAPACITY] * num_layers
    for attention in (*read.attentions, *answer.attentions):
        assert (attention.causal_kind, attention.has_lengths) == ("NONE", False)
    with pytest.raises(EngineError, match=r"KV_CACHE_UPDATE .*: cross_key"):
        check_network(read, len(read.attentions), frozenset())
