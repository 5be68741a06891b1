"""A small canonical decoder written operator by operator, so that engines need no exporter."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, ModelEntry, write_manifest
from outrider.engines.bundle.names import (
    LOGIT_POSITIONS,
    LOGITS,
    START,
    TOKENS,
    key_name,
    new_key_name,
    new_value_name,
    value_name,
)
from outrider.export.graph.grouped_heads import derive_grouped_graph
from outrider.export.graph.tracing.kv_export import POSITIONS_VALUE

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, V = 2, 4, 2, 16, 96
WIDTH = HEADS * HEAD_SIZE
MAX_CONTEXT, MAX_EXTEND, MAX_BATCH = 300, 40, 3


class Decoder:
    """Collects nodes and weights; every method returns the name of what it adds."""

    def __init__(self, nan_token: int | None, kv_heads: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self._rng = np.random.default_rng(7)
        self._nan_token = nan_token
        self._kv_heads = kv_heads

    def weight(self, name: str, *shape: int) -> str:
        values = self._rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        if name == "embedding" and self._nan_token is not None:
            values[self._nan_token] = np.nan
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, name: str, *values: int) -> str:
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, kind: str, *inputs: str, out: str = "", **attributes: object) -> str:
        out = out or f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def heads(self, x: str, name: str, count: int) -> str:
        """[B, T, WIDTH] -> [B, count, T, HEAD_SIZE]."""
        flat = self.add("MatMul", x, self.weight(name, WIDTH, count * HEAD_SIZE))
        split = self.add("Reshape", flat, self.ints(f"{name}.shape", 0, 0, count, HEAD_SIZE))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def turned(self, heads: str) -> str:
        """By angles that follow from positions."""
        return self.add("RotaryEmbedding", heads, "cos", "sin")

    def norm(self, x: str, name: str) -> str:
        scale = numpy_helper.from_array(np.ones(WIDTH, np.float32), name)
        self.weights.append(scale)
        return self.add("RMSNormalization", x, name)

    def attention(self, query: str, key: str, value: str, ends: str, layer: int) -> str:
        return self.add("Attention", query, key, value, "", "", "", ends, is_causal=1)

    def layer(self, x: str, layer: int, ends: str) -> str:
        h = self.norm(x, f"norm.{layer}")
        key, value = (self.heads(h, f"{name}.{layer}", self._kv_heads) for name in "kv")
        key = self.add(
            "TensorScatter", key_name(layer), self.turned(key), START, out=new_key_name(layer)
        )
        value = self.add(
            "TensorScatter", value_name(layer), value, START, out=new_value_name(layer)
        )
        query = self.turned(self.heads(h, f"q.{layer}", HEADS))
        mixed = self.attention(query, key, value, ends, layer)
        mixed = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = self.add("Reshape", mixed, self.ints(f"o.{layer}.shape", 0, 0, WIDTH))
        x = self.add("Add", x, self.add("MatMul", mixed, self.weight(f"o.{layer}", WIDTH, WIDTH)))
        h = self.add(
            "MatMul", self.norm(x, f"norm2.{layer}"), self.weight(f"up.{layer}", WIDTH, 2 * WIDTH)
        )
        h = self.add("Mul", h, self.add("Sigmoid", h))
        return self.add(
            "Add", x, self.add("MatMul", h, self.weight(f"down.{layer}", 2 * WIDTH, WIDTH))
        )

    def build(self) -> onnx.ModelProto:
        num_tokens = self.add("Shape", TOKENS, start=1, end=2)
        ends = self.add("Add", START, num_tokens)
        count = self.add("Squeeze", num_tokens)
        self.weights.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
        self.weights.append(numpy_helper.from_array(np.array(1, np.int64), "one"))
        columns = self.add("Range", "zero", count, "one")
        positions = self.add("Add", self.add("Unsqueeze", START, self.ints("axis", 1)), columns)
        self.weights.append(numpy_helper.from_array(np.array(MAX_CONTEXT - 1, np.int64), "last"))
        positions = self.add("Min", positions, "last", out=POSITIONS_VALUE)
        angles = np.outer(np.arange(MAX_CONTEXT), 0.3 ** np.arange(HEAD_SIZE // 2))
        for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            self.weights.append(numpy_helper.from_array(table.astype(np.float32), f"{name}.table"))
            self.add("Gather", f"{name}.table", positions, out=name)
        x = self.add("Gather", self.weight("embedding", V, WIDTH), TOKENS)
        for layer in range(LAYERS):
            x = self.layer(x, layer, ends)
        where = self.add("Unsqueeze", LOGIT_POSITIONS, self.ints("axis2", 2))
        x = self.add("GatherND", x, where, batch_dims=1)
        self.add("MatMul", self.norm(x, "last_norm"), self.weight("head", WIDTH, V), out=LOGITS)
        return self._model()

    def _model(self) -> onnx.ModelProto:
        ints, floats = TensorProto.INT64, TensorProto.FLOAT
        cache = ["batch", self._kv_heads, "capacity", HEAD_SIZE]
        layers = range(LAYERS)
        past = [name(layer) for layer in layers for name in (key_name, value_name)]
        present = [name(layer) for layer in layers for name in (new_key_name, new_value_name)]
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes,
            "handmade",
            [
                info(TOKENS, ints, ["batch", "tokens"]),
                info(START, ints, ["batch"]),
                info(LOGIT_POSITIONS, ints, ["batch", "wanted"]),
                *(info(name, floats, cache) for name in past),
            ],
            [
                info(LOGITS, floats, ["batch", "wanted", V]),
                *(info(name, floats, cache) for name in present),
            ],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def write_bundle(
    root: Path,
    *,
    nan_token: int | None = None,
    is_grouped: bool = False,
    kv_heads: int = KV_HEADS,
    max_batch: int = MAX_BATCH,
) -> Path:
    """A bundle of the handmade decoder; ``nan_token`` is embedded as NaN."""
    (root / "target").mkdir(parents=True)
    path = root / "target" / "model.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(Decoder(nan_token, kv_heads).build()), path)
    assert not is_grouped or derive_grouped_graph(path)
    (root / "tokenizer.json").write_text("{}")
    write_manifest(root, manifest_of(root, kv_heads=kv_heads, max_batch=max_batch))
    return root


def manifest_of(root: Path, *, kv_heads: int = KV_HEADS, max_batch: int = MAX_BATCH) -> Manifest:
    return Manifest(
        target=ModelEntry(
            path="target",
            num_layers=LAYERS,
            num_kv_heads=kv_heads,
            head_size=HEAD_SIZE,
            vocab_size=V,
            weights="float32",
        ),
        draft=None,
        max_context=MAX_CONTEXT,
        max_batch=max_batch,
        max_gamma=4,
        max_extend=MAX_EXTEND,
        eos_token_ids=(0,),
        bos_token_id=None,
        files=hash_files(root),
    )
