"""Additions to the residual and the norms behind them as one operator, for accelerators: one launch instead of two.

Requires RMSNormalization over the last axis. Ensures the same function: the sum is an output as well.

Source: ONNX Runtime, contrib operator com.microsoft.SkipSimplifiedLayerNormalization.
"""

from __future__ import annotations

import onnx_ir as ir
from outrider.export.graph.edits import constant, source, take_over

DOMAIN, OPERATOR = "com.microsoft", "SkipSimplifiedLayerNormalization"
# Of RMSNormalization where it names none.
_EPSILON = 1e-5
_NUM_AXES = 3
# Outputs of the operator: the norm, two that are left out, the sum.
_NUM_OUTPUTS, _NORM, _SUM = 4, 0, 3


def join_norms(graph: ir.Graph) -> None:
    """Join every norm of a sum of two values, in place."""
    for node in list(graph):
        added = source(node.inputs[0], "Add") if node.op_type == "RMSNormalization" else None
        if added is None or any(constant(value) is not None for value in added.inputs):
            continue
        # The operator takes [batch, tokens, size]; norms of heads have an axis more.
        if (shape := added.outputs[0].shape) is None or len(shape) != _NUM_AXES:
            continue
        if constant(node.inputs[1]) is None or any(
            value is not None and value.shape is not None and value.shape != shape
            for value in added.inputs
        ):
            continue
        joined = ir.node(
            OPERATOR,
            [*added.inputs, node.inputs[1]],
            attributes={"epsilon": node.attributes.get_float("epsilon", _EPSILON)},
            domain=DOMAIN,
            num_outputs=_NUM_OUTPUTS,
        )
        graph.insert_before(added, joined)
        for value in joined.outputs:
            value.name = ""
        take_over(node.outputs[0], joined.outputs[_NORM])
        take_over(added.outputs[0], joined.outputs[_SUM])
        graph.remove([node, added], safe=True)
        graph.opset_imports[DOMAIN] = 1
