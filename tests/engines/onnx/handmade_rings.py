"""The handmade decoder in which some layers see a window of the text alone, and keep a ring of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from outrider.engines.bundle.manifest import RingsEntry, required, write_manifest
from outrider.engines.bundle.names import key_name
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.rings import derive_ring_graph, ring_layers
from outrider.export.graph.tracing.kv_export import POSITIONS_VALUE

from tests.engines.handmade import KV_HEADS, MAX_BATCH, Decoder, manifest_of

# A ring holds these, and as many tokens more as may be open, and as a span may have.
WINDOW, MAX_EXTEND, MAX_OPEN = 5, 9, 4
LEAST_COLUMNS = WINDOW + MAX_EXTEND + MAX_OPEN - 1


class WindowDecoder(Decoder):
    def __init__(self, nan_token: int | None, kv_heads: int, layers: tuple[int, ...]) -> None:
        super().__init__(nan_token, kv_heads)
        self._layers = layers

    def attention(self, query: str, key: str, value: str, ends: str, layer: int) -> str:
        if layer not in self._layers:
            return super().attention(query, key, value, ends, layer)
        count = self.add("Squeeze", self.add("Shape", key_name(layer), start=2, end=3))
        columns = self.add("Range", "zero", count, "one")
        last = self.add("Sub", POSITIONS_VALUE, self.number(f"window.{layer}", WINDOW, np.int64))
        last = self.add("Unsqueeze", last, self.ints(f"window.axes.{layer}", 1, 3))
        is_seen = self.add("Greater", columns, last)
        seen, unseen = (
            self.number(f"window.{name}.{layer}", number, np.float32)
            for name, number in (("seen", 0.0), ("unseen", -np.inf))
        )
        bias = self.add("Where", is_seen, seen, unseen)
        return self.add("Attention", query, key, value, bias, "", "", ends, is_causal=1)

    def number(self, name: str, value: float, kind: type) -> str:
        self.weights.append(numpy_helper.from_array(np.array(value, kind), name))
        return name


def write_rings_bundle(
    root: Path,
    *,
    columns: int = LEAST_COLUMNS,
    is_grouped: bool = True,
    nan_token: int | None = None,
    layers: tuple[int, ...] = (0,),
    max_batch: int = MAX_BATCH,
    max_extend: int = MAX_EXTEND,
) -> Path:
    """A bundle of the handmade decoder with rings of so many columns in some layers; none for 0."""
    (root / "target").mkdir(parents=True)
    path = root / "target" / "model.onnx"
    decoder = WindowDecoder(nan_token, KV_HEADS, layers)
    onnx.save(onnx.shape_inference.infer_shapes(decoder.build()), path)
    assert ring_layers(path) == layers
    if is_grouped:
        assert derive_grouped_graph(path, has_rings=columns > 0)
    elif columns:
        derive_ring_graph(path)
    (root / "tokenizer.json").write_text("{}")
    rings = RingsEntry(window=WINDOW, columns=columns, layers=layers) if columns else None
    manifest = manifest_of(root, max_batch=max_batch)
    target = replace(manifest.target, rings=rings)
    max_open = rings.max_open(max_extend) if rings else MAX_OPEN
    write_manifest(
        root,
        replace(
            manifest,
            target=target,
            requires=required(target),
            max_extend=max_extend,
            max_gamma=min(max_open, max_extend - 1),
        ),
    )
    return root
