"""One encoder for a target and its draft, where both were exported with the same.

Requires ``encode.onnx`` of both, with weights as they are stored. Where the draft's computes its keys and values from a
value that the target's graph computes too, by the same operators from the same constants, that value is the target's
``hidden``: an output of the target's graph from then on, and the input of ``cross.onnx``, which is the draft's graph
from there on. So the draft's projections of what the target's encoder answered have the bits that its own graph gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from outrider.engines.bundle.encoder_decoder import CROSS_FILE, HIDDEN, SOURCE
from outrider.export.graph.edits import constant_tensor, drop_unused, put_input

_AXES = ("batch", "length")
# Operators of projections and caches; any other is part of an encoder, of which a draft would have the end for itself.
_AFTER_ENCODER = frozenset(
    {
        "Add",
        "Cast",
        "DequantizeLinear",
        "Expand",
        "MatMul",
        "Reshape",
        "Shape",
        "Split",
        "TensorScatter",
        "Transpose",
    }
)


def share_encoder(target: Path, draft: Path, *, hidden_size: int) -> bool:
    """Write ``cross.onnx`` beside the draft's ``encode.onnx`` if the target's answers for it; whether that is so.

    Args:
        target: its ``encode.onnx``, which gains an output if so.
        draft: its ``encode.onnx``, which stays as it is.
        hidden_size: width of what the target's encoder answers.
    """
    theirs, ours = ir.load(target), ir.load(draft)
    known = {digest: value for value, digest in _digests(theirs.graph)}
    digests = dict(_digests(ours.graph))
    # What the draft computes by itself starts from these.
    starts = {
        value
        for node in ours.graph
        if digests.get(node.outputs[0]) not in known
        for value in node.inputs
        if value is not None and digests.get(value) in known
    }
    if len(starts) != 1:
        return False
    (start,) = starts
    shared = known[digests[start]]
    axes = (*_AXES, hidden_size)
    if start.is_graph_input() or start.shape is None or start.shape[-1] != hidden_size:
        return False
    start.replace_all_uses_with(put_input(ours.graph, HIDDEN, ir.DataType.FLOAT, axes))
    drop_unused(ours.graph)
    if not {node.op_type for node in ours.graph} <= _AFTER_ENCODER:
        return False
    for value in list(ours.graph.inputs):
        if value.name == SOURCE:
            ours.graph.inputs.remove(value)
    shared.name, shared.shape = HIDDEN, ir.Shape(axes)
    theirs.graph.outputs.append(shared)
    ir.save(ours, draft.with_name(CROSS_FILE))
    ir.save(theirs, target)
    return True


def _digests(graph: ir.Graph) -> Iterator[tuple[ir.Value, bytes]]:
    """Yield what a graph computes of a source's tokens, each value with a digest of how."""
    known: dict[ir.Value, bytes] = {}
    of_source = {value for value in graph.inputs if value.name == SOURCE}
    for node in graph:
        parts = [node.domain.encode(), node.op_type.encode()]
        attributes = sorted(node.attributes.items())
        parts += (ir.to_proto(value).SerializeToString() for _, value in attributes)
        for value in node.inputs:
            if value is not None and value not in known:
                known[value] = _digest_of_given(value)
            parts.append(b"" if value is None else known[value])
        is_of_source = not of_source.isdisjoint(filter(None, node.inputs))
        for index, value in enumerate(node.outputs):
            known[value] = hashlib.sha256(repr((index, parts)).encode()).digest()
            if is_of_source:
                of_source.add(value)
                yield value, known[value]


def _digest_of_given(value: ir.Value) -> bytes:
    """Return the digest of a constant by its content, of an input by its name."""
    tensor = constant_tensor(value)
    if tensor is None:
        return hashlib.sha256(f"input {value.name}".encode()).digest()
    content = hashlib.sha256(memoryview(tensor.tobytes())).digest()
    return hashlib.sha256(repr((tensor.dtype, tensor.shape, content)).encode()).digest()
