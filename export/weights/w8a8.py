"""Weights in 8 bits and, behind norms, activations too, by static scales.

Requires a canonical graph with float32 weights. Ensures that a product of a norm's output is computed from int8 on
both sides (QuantizeLinear, DequantizeLinear, MatMul; ONNX Runtime fuses them to one integer product), where that
changes it little. All other products have their weights in blocks (``blocks``).

A norm's output has nearly one size in every row, so one scale serves all rows; the norm's weights even out channels
that stand out. Outputs of a gate or of attention have neither property. A static scale, unlike one measured per call,
makes a row's bits independent of its neighbours.

Source: Xiao et al. 2023 (SmoothQuant, arXiv 2211.10438), section 4, alpha = 0.5, static scale per tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from outrider.engines.base import BundleError, FloatArray
from outrider.engines.bundle.manifest import W8A8
from outrider.export.graph.edits import constant, gate_columns, put
from outrider.export.model_config import ModelConfig
from outrider.export.progress import Steps, untold
from outrider.export.weights.blocks import (
    BITS,
    constant_weight,
    is_gate,
    product_moments,
    quantize_graph,
    split_gemms,
    text_of,
    weight_tensor,
)
from outrider.export.weights.rounding import Int8Array, restore, round_by_activations
from outrider.export.weights.widened import canonical_graphs, load_widened, save_over
from outrider.export.weights.written_text import WrittenText, observe

INTEGER_KINDS = (*BITS, W8A8)
"""Kinds of weights that are stored as integers."""

MOST_ERROR = 0.02
"""Largest error of a product, relative to a row's length; root mean square over rows."""

_NORMS = ("RMSNormalization", "LayerNormalization")
_MIGRATION = 0.5
_GREATEST = 127
_LEAST = 1e-5
# Shares of the greatest magnitude that a scale may reach up to; greater values are cut.
_REACHES = np.linspace(0.2, 1.0, 33)
# Rows of activations that errors are measured on, about.
_NUM_JUDGED = 256


def quantize_static(
    path: Path, model_config: ModelConfig, text: WrittenText | None = None, report: Steps = untold
) -> int:
    """Rewrite the canonical graph at ``path``; return how many products take 8-bit activations.

    They are measured on ``text`` or, without one, on text that the model writes. ``report`` is told of the norms, then
    of the other products, that were seen to.

    ``path``.data is replaced too, and ``encode.onnx`` beside it, if there is one, is rewritten likewise.

    Raises:
        BundleError: no product of a graph takes 8-bit activations within ``MOST_ERROR``.
    """
    text, total = text or text_of(path, model_config), 0
    for one in canonical_graphs(path):
        model = load_widened(one)
        split_gemms(model.graph)
        normed = [found.name for found in normed_products(model.graph)]
        activations = observe(one, model_config, normed, text)
        moments = product_moments(model.graph, one, model_config, text, 8)
        count = quantize_products(model.graph, activations, report)
        if count == 0:
            raise BundleError(
                f"{one.parent.name}/{one.name}: no product takes 8-bit activations within "
                f"{MOST_ERROR:.0%} of error; export with --weights int8"
            )
        quantize_graph(model.graph, 8, moments, report)
        save_over(model, one)
        total += count
    return total


@dataclass(frozen=True, slots=True)
class NormedProducts:
    """A norm and the products that alone read it; weights [K, N] float32."""

    norm: ir.Node
    products: tuple[ir.Node, ...]

    @property
    def weights(self) -> tuple[FloatArray, ...]:
        """The products' weights, read now."""
        found = (constant_weight(product.inputs[1]) for product in self.products)
        return tuple(weight for weight in found if weight is not None)

    @property
    def name(self) -> str:
        """Name of the first product's input: the norm's output, or that reshaped."""
        left = self.products[0].inputs[0]
        assert left is not None
        return str(left.name)


def normed_products(graph: ir.Graph) -> Iterator[NormedProducts]:
    """Yield norms with constant weights whose output only products with constant weights read."""
    for node in graph:
        if node.op_type not in _NORMS or any(constant(gain) is None for gain in node.inputs[1:]):
            continue
        readers = _readers(node.outputs[0])
        if readers and all(
            reader.op_type == "MatMul"
            and place == 0
            and weight_tensor(reader.inputs[1]) is not None
            for reader, place in readers
        ):
            yield NormedProducts(node, tuple(reader for reader, _ in readers))


def quantize_products(
    graph: ir.Graph, activations: Mapping[str, FloatArray], report: Steps = untold
) -> int:
    """Compute products behind norms from int8, in place, where they change little; return how many.

    ``activations`` [rows, K] float32 are by the name of a product's input.
    """
    count, norms, num_gates = 0, list(normed_products(graph)), gate_columns(graph)
    for index, found in enumerate(norms, start=1):
        report(index, len(norms))
        given, weights = activations[found.name], found.weights
        factors = evening_factors(given, weights)
        evened = given / factors
        scale = _activation_scale(evened)
        stored = [
            None
            if is_gate(weight, num_gates)
            else round_by_activations(
                weight * factors[:, None], evened, bits=8, block_size=len(weight)
            )
            for weight in weights
        ]
        judged = slice(None, None, max(1, len(given) // _NUM_JUDGED))
        narrow = _narrowed(evened[judged], float(scale))
        errors = [
            _error(given[judged] @ weight, narrow @ restore(*one))
            for weight, one in zip(weights, stored, strict=True)
            if one is not None
        ]
        if errors and max(errors) <= MOST_ERROR:
            _rewrite(graph, found, factors, scale, stored)
            count += len(errors)
    return count


def evening_factors(given: FloatArray, weights: tuple[FloatArray, ...]) -> FloatArray:
    """Return factors [K] float32 to divide activations [rows, K] by and multiply weights [K, N] with.

    Half of the channels' difference in range moves into the weights (SmoothQuant, equation 4).
    """
    ranges = np.maximum(np.abs(given).max(axis=0), _LEAST)
    heights = np.maximum.reduce([np.abs(weight).max(axis=1) for weight in weights])
    factors: FloatArray = ranges**_MIGRATION / np.maximum(heights, _LEAST) ** (1 - _MIGRATION)
    return factors.astype(np.float32)


def _readers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the nodes that read a value, through Reshape, and at which input; none for an output."""
    readers = []
    for use in value.uses():
        if use.node.op_type == "Reshape" and use.idx == 0:
            readers += _readers(use.node.outputs[0])
        else:
            readers.append((use.node, use.idx))
    return [] if value.is_graph_output() else readers


def _activation_scale(given: FloatArray) -> np.float32:
    """Return the scale of least square error over the activations [rows, K]."""
    scales = max(float(np.abs(given).max()), _LEAST) * _REACHES / _GREATEST
    errors = [np.square(_narrowed(given, scale) - given).mean() for scale in scales]
    return np.float32(scales[int(np.argmin(errors))])


def _narrowed(given: FloatArray, scale: float) -> FloatArray:
    """Return activations after QuantizeLinear and DequantizeLinear."""
    integers: FloatArray = np.clip(np.rint(given / scale), -_GREATEST - 1, _GREATEST)
    return integers * scale


def _error(exact: FloatArray, found: FloatArray) -> float:
    """Return the root mean square of the rows' relative errors: tokens count equally."""
    lengths = np.maximum(np.square(exact).sum(axis=1), _LEAST**2)
    return float(np.sqrt((np.square(found - exact).sum(axis=1) / lengths).mean()))


def _rewrite(
    graph: ir.Graph,
    found: NormedProducts,
    factors: FloatArray,
    scale: np.float32,
    stored: list[tuple[Int8Array, FloatArray] | None],
) -> None:
    """Let products read int8 activations and weights; those that nothing is stored for stay float32."""
    name = found.name
    for place, value in enumerate(found.norm.inputs[1:], start=1):
        gain = constant(value)
        assert gain is not None
        evened = put(graph, gain / factors, f"{name}.evened.{place}")
        found.norm.replace_input_with(place, evened)
    step = put(graph, np.asarray(scale), f"{name}.scale")
    zero = put(graph, np.zeros((), np.int8), f"{name}.zero")
    restored: dict[ir.Value, ir.Value] = {}
    for index, (product, rounded) in enumerate(zip(found.products, stored, strict=True)):
        part = f"{name}.product_{index}"
        if rounded is None:
            exact = constant_weight(product.inputs[1])
            assert exact is not None
            product.replace_input_with(1, put(graph, exact * factors[:, None], f"{part}.weight"))
            continue
        columns, scales = rounded
        _deepen(graph, product)
        left = product.inputs[0]
        assert left is not None
        if left not in restored:
            narrow = ir.node("QuantizeLinear", [left, step, zero])
            widen = ir.node("DequantizeLinear", [narrow.outputs[0], step, zero])
            graph.insert_before(product, [narrow, widen])
            restored[left] = widen.outputs[0]
            _describe(narrow.outputs[0], f"{part}.activations.q", ir.DataType.INT8, left.shape)
            _describe(widen.outputs[0], f"{part}.activations", ir.DataType.FLOAT, left.shape)
        stored_weight = put(graph, columns, f"{part}.weight.q")
        weight_scale = put(graph, scales[0], f"{part}.weight.scale")
        widened = ir.node("DequantizeLinear", [stored_weight, weight_scale], attributes={"axis": 1})
        _describe(widened.outputs[0], f"{part}.weight", ir.DataType.FLOAT, ir.Shape(columns.shape))
        graph.insert_before(product, widened)
        product.replace_input_with(0, restored[left])
        product.replace_input_with(1, widened.outputs[0])


def _deepen(graph: ir.Graph, product: ir.Node) -> None:
    """Give a product of two matrices a third axis of one.

    With its bias ONNX Runtime would make a Gemm of it, and that is not computed from integers.
    """
    left, old = product.inputs[0], product.outputs[0]
    assert left is not None
    if left.shape is None or len(left.shape) != 2:
        return
    axis = put(graph, np.array([0]), f"{old.name}.axis")
    deep = ir.node("Unsqueeze", [left, axis])
    flat = ir.node("Squeeze", [old, axis])
    _describe(deep.outputs[0], f"{old.name}.left", ir.DataType.FLOAT, ir.Shape([1, *left.shape]))
    graph.insert_before(product, deep)
    graph.insert_after(product, flat)
    product.replace_input_with(0, deep.outputs[0])
    old.replace_all_uses_with(flat.outputs[0])
    flat.replace_input_with(0, old)
    _describe(flat.outputs[0], f"{old.name}.flat", ir.DataType.FLOAT, old.shape)
    old.shape = None if old.shape is None else ir.Shape([1, *old.shape])


def _describe(value: ir.Value, name: str, kind: ir.DataType, shape: ir.Shape | None) -> None:
    value.name, value.type, value.shape = name, ir.TensorType(kind), shape
