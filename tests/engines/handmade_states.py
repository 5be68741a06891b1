"""The handmade decoder with recurrent layers: gated delta nets, or convolutions alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from outrider.engines.bundle.manifest import Manifest, write_manifest
from outrider.engines.bundle.states import (
    OPEN,
    PENDING_ROWS,
    SCAN_OUT,
    SETTLED,
    STATES,
    TAPS,
    WINDOW_ROWS,
    StatesEntry,
    kept_names,
    place_names,
)

from tests.engines.handmade import KV_HEADS, LAYERS, MAX_BATCH, WIDTH, Decoder, manifest_of

MICROSOFT = "com.microsoft"
KEY_HEADS, HEADS, SIZE = 1, 2, 8
KEY, VALUE = KEY_HEADS * SIZE, HEADS * SIZE


def states_entry(max_open: int, kernel: int = 4, *, has_scan: bool = True) -> StatesEntry:
    scan = {
        "row": 2 * KEY + VALUE + 2 * HEADS,
        "heads": HEADS,
        "key_size": SIZE,
        "value_size": SIZE,
    }
    return StatesEntry(
        mixers=LAYERS,
        kernel=kernel,
        channels=2 * KEY + VALUE,
        max_open=max_open,
        **(scan if has_scan else dict.fromkeys(scan, 0)),
    )


class HybridDecoder(Decoder):
    """Rows of a call lie one behind the other in its recurrent layers, [R, ...]."""

    def __init__(self, states: StatesEntry, kv_heads: int) -> None:
        super().__init__(None, kv_heads)
        self._states = states

    def layer(self, x: str, layer: int, ends: str) -> str:
        rows = self.add(
            "Reshape", self.norm(x, f"mixer_norm.{layer}"), self.ints(f"rows.{layer}", -1, WIDTH)
        )
        answers = self.mixer(rows, layer)
        shape = self.add("Shape", x)
        mixed = self.add("MatMul", answers, self.weight(f"mixer_out.{layer}", VALUE, WIDTH))
        x = self.add("Add", x, self.add("Reshape", mixed, shape))
        return super().layer(x, layer, ends)

    def mixer(self, rows: str, at: int) -> str:
        """[R, WIDTH] -> [R, VALUE]."""
        states = self._states
        mixed = self.add("MatMul", rows, self.weight(f"mixer_in.{at}", WIDTH, states.channels))
        pool = self.pool(f"window.{at}", mixed, states.channels)
        taps = self.add(
            "Mul",
            self.add("Gather", pool, TAPS),
            self.weight(f"taps.{at}", states.kernel, 1, states.channels),
        )
        # A sum of elements in one order, at every place alike.
        total = ""
        for tap in range(states.kernel):
            one = self.add("Gather", taps, self.ints(f"tap.{at}.{tap}", tap))
            one = self.add("Squeeze", one, self.ints(f"axis.{at}.{tap}", 0))
            total = self.add("Add", total, one) if total else one
        self.add("Gather", pool, WINDOW_ROWS, out=f"new_window.{at}")
        mixed = self.add("Mul", total, self.add("Sigmoid", total))
        query, key, value = self.split(mixed, at, KEY, KEY, VALUE)
        return self.scan(rows, query, key, value, at) if states.row else value

    def scan(self, rows: str, query: str, key: str, value: str, at: int) -> str:
        states = self._states
        decay, beta = (
            self.add("Sigmoid", self.add("MatMul", rows, self.weight(f"{name}.{at}", WIDTH, HEADS)))
            for name in ("decay", "beta")
        )
        pool = self.pool(
            f"pending.{at}",
            self.add("Concat", query, key, value, self.add("Neg", decay), beta, axis=1),
            states.row,
        )
        state, found = f"state.{at}", []
        for side, after in ((SETTLED, f"new_state.{at}"), (OPEN, f"dropped.{at}")):
            parts = self.split(
                self.add("Gather", pool, side), f"{at}.{side}", KEY, KEY, VALUE, HEADS, HEADS
            )
            out = f"{side}.{at}"
            self.nodes.append(
                helper.make_node(
                    "LinearAttention", [*parts[:3], state, *parts[3:]], [out, after], domain=MICROSOFT,
                    q_num_heads=KEY_HEADS, kv_num_heads=HEADS, update_rule="gated_delta", scale=SIZE**-0.5,
                )
            )  # fmt: skip
            found.append(out)
            state = after
        self.add("Gather", pool, PENDING_ROWS, out=f"new_pending.{at}")
        flat = self.add(
            "Reshape", self.add("Concat", *found, axis=1), self.ints(f"flat.{at}", -1, VALUE)
        )
        return self.add("Gather", flat, SCAN_OUT)

    def pool(self, kept: str, new: str, width: int) -> str:
        zero = f"zero.{kept}"
        self.weights.append(numpy_helper.from_array(np.zeros((1, width), np.float32), zero))
        flat = self.add("Reshape", kept, self.ints(f"width.{kept}", -1, width))
        return self.add("Concat", zero, flat, new, axis=0)

    def split(self, x: str, at: object, *sizes: int) -> list[str]:
        parts = [f"part.{at}.{index}" for index in range(len(sizes))]
        self.nodes.append(
            helper.make_node("Split", [x, self.ints(f"sizes.{at}", *sizes)], parts, axis=-1)
        )
        return parts

    def _model(self) -> onnx.ModelProto:
        model, states = super()._model(), self._states
        shapes = {
            "state": (states.heads, states.key_size, states.value_size),
            "pending": (states.max_open, states.row),
            "window": (states.window, states.channels),
        }
        info = helper.make_tensor_value_info
        for name in kept_names(states):
            shape = ["batch", *shapes[name.partition(".")[0]]]
            model.graph.input.append(info(name, TensorProto.FLOAT, shape))
            model.graph.output.append(info(f"new_{name}", TensorProto.FLOAT, shape))
        places = {
            TAPS: [states.kernel, "rows"],
            WINDOW_ROWS: ["batch", states.window],
            SETTLED: ["batch", SETTLED],
            OPEN: ["batch", OPEN],
            SCAN_OUT: ["rows"],
            PENDING_ROWS: ["batch", states.max_open],
        }
        for name in place_names(states):
            model.graph.input.append(info(name, TensorProto.INT64, places[name]))
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return model


def write_states_bundle(root: Path, states: StatesEntry, *, max_batch: int = MAX_BATCH) -> Path:
    """A bundle of the handmade decoder with recurrent layers of these sizes."""
    (root / "target").mkdir(parents=True)
    onnx.save(HybridDecoder(states, KV_HEADS).build(), root / "target" / "model.onnx")
    (root / "tokenizer.json").write_text("{}")
    write_manifest(root, with_states(manifest_of(root, max_batch=max_batch), states))
    return root


def with_states(manifest: Manifest, states: StatesEntry) -> Manifest:
    return replace(
        manifest,
        target=replace(manifest.target, states=states),
        max_gamma=min(states.max_open, manifest.max_extend - 1),
        requires=(STATES,),
    )
