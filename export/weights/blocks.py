"""Weights in 8 or 4 bits, in standard ONNX: DequantizeLinear in blocks along K.

Requires a canonical graph whose MatMul weights are constants [K, N] (possibly behind a Transpose).
Ensures the same graph with those weights stored as integers, their scales beside them; ONNX Runtime fuses the pair to
MatMulNBits. Scales are stored in 16 bits where that is exact, behind a Cast that is folded when the graph is loaded.
Embeddings are looked up among rows of integers (``lookup``), of 8 bits: four cost SmolLM2-135M 2 % of perplexity. One
that is the head's matrix too is stored once.

Source: ONNX DequantizeLinear-21, blocked quantisation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from outrider.engines.base import BundleError, FloatArray
from outrider.engines.bundle.states import TAPS
from outrider.export.graph.edits import drop_unused, gate_columns, put, put_tensor
from outrider.export.graph.position_tables import is_position_table
from outrider.export.model_config import ModelConfig
from outrider.export.progress import Steps, untold
from outrider.export.weights.lookup import (
    TableRows,
    Tape,
    look_up_columns,
    look_up_rows,
    part_shared_blocks,
    token_lookups,
)
from outrider.export.weights.rounding import (
    Int8Array,
    panel_size,
    round_by_moments,
    round_rows,
    round_to_nearest,
)
from outrider.export.weights.widened import canonical_graphs, load_widened, save_over
from outrider.export.weights.written_text import WrittenText, observe_moments, write_text

BITS = {"int8": 8, "int4": 4}
# Rows of K that share a scale; the first that divides K. Longer blocks are quicker, but from 128 on ONNX
# Runtime's kernel gives a row other bits beside others.
BLOCK_SIZES = {8: (64, 32), 4: (32,)}
# Of an embedding, whether or not it is the head too.
_TABLE_BITS = 8
# What mixes tokens in a layer: attention, a scan, or a convolution, which reads its taps.
_MIXING = ("Attention", "LinearAttention", TAPS)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight in blocks along K.

    Attributes:
        integers: [K, N] int8; uint8 where there are zero points.
        scales: [K / block, N] float32.
        bits: of an integer, 4 or 8.
        zero_points: [K / block, N] uint8; None where all are zero.
    """

    integers: Int8Array | npt.NDArray[np.uint8]
    scales: FloatArray
    bits: int
    zero_points: npt.NDArray[np.uint8] | None = None

    def tensor(self, integers: Int8Array | npt.NDArray[np.uint8], name: str) -> ir.TensorProtocol:
        """Return its integers or zero points as a tensor of their bits."""
        if self.bits == 8:
            return ir.tensor(integers, name=name)
        kind = ir.DataType.INT4 if self.zero_points is None else ir.DataType.UINT4
        return packed_tensor(integers, kind, name)


def packed_tensor(
    integers: npt.NDArray[np.integer], kind: ir.DataType, name: str
) -> ir.TensorProtocol:
    """Return integers of 8 bits as a tensor of 4, two in a byte."""
    nibbles = integers.reshape(-1).view(np.uint8) & np.uint8(0xF)
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    packed = nibbles[0::2] | (nibbles[1::2] << np.uint8(4))
    return ir.PackedTensor(packed, kind, shape=ir.Shape(integers.shape), name=name)


def quantize_file(
    path: Path,
    kind: str,
    model_config: ModelConfig | None = None,
    text: WrittenText | None = None,
    report: Steps = untold,
) -> int:
    """Rewrite the canonical graph at ``path`` with MatMul weights of ``kind``; return how many.

    ``path``.data is replaced too, and ``encode.onnx`` beside it, if there is one, is rewritten likewise. With the sizes
    of its model, weights are rounded by the activations on ``text`` or, without one, on text that the model writes;
    else to nearest. ``report`` is told of the nodes that were seen to.

    Raises:
        BundleError: no weight could be quantised.
    """
    if model_config is not None and text is None:
        text = text_of(path, model_config)
    total = 0
    for one in canonical_graphs(path):
        model = load_widened(one)
        split_gemms(model.graph)
        bits, moments = BITS[kind], None
        if model_config is not None and text is not None:
            moments = product_moments(model.graph, one, model_config, text, _TABLE_BITS)
        count = quantize_graph(model.graph, bits, moments, report)
        if count == 0:
            raise BundleError(f"{one.name}: no MatMul weight with K a multiple of 32")
        save_over(model, one)
        total += count
    return total


def text_of(path: Path, model_config: ModelConfig) -> WrittenText:
    """Return text that a model writes; a decoder alone writes it with weights of 8 bits, in a quarter of the memory."""
    if model_config.source is not None:
        return write_text(path, model_config)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        rounded, model = Path(folder) / path.name, load_widened(path)
        split_gemms(model.graph)
        quantize_graph(model.graph, _TABLE_BITS)
        ir.save(model, rounded, external_data=f"{path.name}.data")
        part_shared_blocks(rounded)
        return write_text(rounded, model_config)


def product_moments(
    graph: ir.Graph, path: Path, model_config: ModelConfig, text: WrittenText, bits: int
) -> dict[str, FloatArray]:
    """Return second moments [K / P, P, P] float32 of what products with constant weights multiply, by its name."""
    panels = {}
    for node in graph:
        weight = weight_tensor(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is None or node.inputs[0] is None:
            continue
        length = weight.shape.numpy()[0]
        if isinstance(node.inputs[1], ir.Value) and not node.inputs[1].is_initializer():
            length = weight.shape.numpy()[1]
        if (block := _block_size(length, bits)) is not None:
            size = panel_size(length, block)
            panels[str(node.inputs[0].name)] = length // size, size
    return observe_moments(path, model_config, panels, text)


def quantize_graph(
    graph: ir.Graph,
    bits: int,
    moments: Mapping[str, FloatArray] | None = None,
    report: Steps = untold,
) -> int:
    """Store every MatMul weight of a graph without Gemm nodes in blocks, in place; return how many.

    Those that choose experts or gate a delta rule stay float32; delicate ones keep 8 bits.

    ``moments`` are those of ``product_moments``; None rounds to nearest.
    """
    done, products = 0, [node for node in graph if node.op_type == "MatMul"]
    lookups, num_gates = _lookups(graph), gate_columns(graph)
    delicate = _delicate(products) if bits < _TABLE_BITS else set()
    for index, node in enumerate(products, start=1):
        report(index, len(products))
        weight, left = constant_weight(node.inputs[1]), node.inputs[0]
        if weight is None or left is None or _reaches(node, "TopK"):
            continue
        if is_gate(weight, num_gates):
            continue
        shared = next((one for one in lookups if _is_table_of(one, weight)), None)
        num_bits = _TABLE_BITS if shared is not None or node in delicate else bits
        size = _block_size(len(weight), num_bits)
        if size is None:
            continue
        if moments is None:
            stored = round_to_nearest(weight, bits=num_bits, block_size=size)
        else:
            given = moments[str(left.name)]
            stored = round_by_moments(weight, given, bits=num_bits, block_size=size)
        head = replace_weight(graph, node, Blocks(*stored, num_bits), f"weight_{done}")
        if shared is not None:
            look_up_columns(graph, shared, head, f"embedding_{done}")
            lookups.remove(shared)
        done += 1
    _store_tables(graph)
    drop_unused(graph)
    return done


def _lookups(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that look tokens up in a float32 matrix."""
    return [
        node
        for node in token_lookups(graph)
        if node.inputs[0] is not None
        and weight_tensor(node.inputs[0]) is not None
        and not is_position_table(node.inputs[0].name)
    ]


def _is_table_of(lookup: ir.Node, weight: FloatArray) -> bool:
    """Return whether a lookup's table [V, K] is a product's weight [K, V]; each may have a constant of its own."""
    tensor = weight_tensor(lookup.inputs[0])
    assert tensor is not None
    return tensor.shape.numpy() == weight.shape[::-1] and np.array_equal(tensor.numpy().T, weight)


def _block_size(length: int, bits: int) -> int | None:
    return next((size for size in BLOCK_SIZES[bits] if length % size == 0), None)


def _store_tables(graph: ir.Graph) -> None:
    """Look tokens up among rows of integers, in each table whose rows are blocks."""
    for number, node in enumerate(_lookups(graph)):
        tensor = weight_tensor(node.inputs[0])
        assert tensor is not None
        num_rows, width = tensor.shape.numpy()
        size = _block_size(width, _TABLE_BITS)
        if size is None:
            continue
        integers, scales = round_rows(tensor.numpy(), bits=_TABLE_BITS, block_size=size)
        rows = TableRows(
            shape=(num_rows, width),
            bits=_TABLE_BITS,
            integers=partial(np.asarray, integers),
            middle=1 << (_TABLE_BITS - 1),
            scales=[ir.tensor(scales.astype(np.float16))],
        )
        look_up_rows(graph, node, rows, f"table_{number}")


def is_gate(weight: FloatArray, num_gates: int) -> bool:
    """Return whether a weight [K, N] gates a delta rule of so many heads: by decay, by beta, or both side by side."""
    return bool(weight.shape[1] <= 2 * num_gates)


def _delicate(products: Sequence[ir.Node]) -> set[ir.Node]:
    """Return the products that keep 8 bits: those that make keys and values, and those of the last layer.

    SmolLM2-135M in 4 bits has 1.14 times the perplexity; 1.11 with 8 bits for keys and values, 1.08 with the last layer
    in 8 bits too (docs/measurements.md).
    """
    cached = {node for node in products if _reaches(node, "TensorScatter")}
    # A layer begins with attention or a mixer; of layers that read the caches of others, the queries alone.
    mixing = [place for place, node in enumerate(products) if _reaches(node, *_MIXING)]
    if not cached or mixing == [*range(len(mixing))]:
        # Of one layer none is the last, or all would keep 8 bits.
        return cached
    return cached | {*products[mixing[-1] :]}


def _reaches(product: ir.Node, *wanted: str) -> bool:
    """Return whether a product's numbers reach an operator, or one that reads an input, before the next product.

    What chooses experts reaches TopK: a small weight, whose rounding would choose others. What is cached reaches
    TensorScatter.
    """
    left, seen = [product], {product}
    while left:
        for use in (use for value in left.pop().outputs for use in value.uses()):
            met = {use.node.op_type, *(value.name for value in use.node.inputs if value)}
            if not met.isdisjoint(wanted):
                return True
            if use.node.op_type not in ("MatMul", "Attention") and use.node not in seen:
                seen.add(use.node)
                left.append(use.node)
    return False


def split_gemms(graph: ir.Graph) -> None:
    """Write x @ W + b as MatMul and Add where Gemm does no more.

    ONNX Runtime fuses quantised weights into MatMul only.
    """
    for node in list(graph):
        if node.op_type == "Gemm":
            _split_gemm(graph, node)


def _split_gemm(graph: ir.Graph, node: ir.Node) -> None:
    attributes = node.attributes
    is_scaled = any(attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    weight = node.inputs[1]
    if is_scaled or attributes.get_int("transA", 0) != 0 or weight is None:
        return
    old, added = node.outputs[0], []
    if attributes.get_int("transB", 0):
        added.append(ir.node("Transpose", [weight], attributes={"perm": [1, 0]}))
        weight = added[0].outputs[0]
    product = ir.node("MatMul", [node.inputs[0], weight])
    added.append(product)
    # The exporter leaves a bias of zeros away.
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        added.append(ir.node("Add", [product.outputs[0], node.inputs[2]]))
    for part in added:
        part.outputs[0].name = f"{old.name}.{part.op_type}"
        part.outputs[0].type = old.type
    graph.insert_before(node, added)
    for value in (product.outputs[0], added[-1].outputs[0]):
        value.shape = old.shape
    old.replace_all_uses_with(added[-1].outputs[0])
    graph.remove(node, safe=True)


def constant_weight(value: ir.Value | None) -> FloatArray | None:
    """Return the two-dimensional float32 constant behind a value, through one Transpose; else None."""
    tensor = weight_tensor(value)
    if value is None or tensor is None:
        return None
    weight = tensor.numpy()
    return weight if value.is_initializer() else np.ascontiguousarray(weight.T)


def weight_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor that ``constant_weight`` reads, unread."""
    if value is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        value = producer.inputs[0]
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    tensor = value.const_value
    is_matrix = len(tensor.shape) == 2 and tensor.dtype is ir.DataType.FLOAT
    return tensor if is_matrix else None


def replace_weight(graph: ir.Graph, node: ir.Node, blocks: Blocks, name: str) -> list[ir.Value]:
    """Let a product read its weight from blocks, by a DequantizeLinear whose constants begin with ``name``.

    Return what is stored: integers, scales and, where there are such, zero points.
    """
    stored = [put_tensor(graph, blocks.tensor(blocks.integers, f"{name}.q"))]
    narrow = blocks.scales.astype(np.float16)
    is_exact = bool((narrow.astype(np.float32) == blocks.scales).all())
    stored.append(put(graph, narrow if is_exact else blocks.scales, f"{name}.scale"))
    if blocks.zero_points is not None:
        stored.append(put_tensor(graph, blocks.tensor(blocks.zero_points, f"{name}.zero")))
    size = len(blocks.integers) // len(blocks.scales)
    tape = Tape(graph, node, name)
    given = [stored[0], tape.float32(stored[1]), *stored[2:]]
    shape = ir.Shape(blocks.integers.shape)
    restored = tape.add("DequantizeLinear", given, shape, {"axis": 0, "block_size": size})
    restored.name = f"{name}.restored"
    node.replace_input_with(1, restored)
    return stored
