"""Sliding windows in a finished graph: biases of attention that hide keys, found by their form.

``export.graph.tracing.windows`` makes them:

    Where(Greater(keys, Unsqueeze(Sub(queries, window))), 0, -inf)    [B, 1, T, S], positions of keys and queries

Without Unsqueeze it is one still, where queries have the shape already.
A graph whose attention reads a mask takes what the bias is made of, as bool, into that mask: what other biases of
attention add is a number per key and head, a window only hides.

Source: ONNX operators Greater-13, Where-16.
"""

from __future__ import annotations

import onnx_ir as ir
from outrider.export.graph.edits import constant, source


def seen_in_window(bias: ir.Value | None) -> ir.Value | None:
    """Return where a window's bias hides nothing, [B, 1, T, S] bool; None of a bias that is no window's."""
    where = source(bias, "Where")
    return None if where is None or _width(where) is None else where.inputs[0]


def window_of(bias: ir.Value) -> int:
    """Return the window of a bias, in tokens."""
    where = source(bias, "Where")
    width = None if where is None else _width(where)
    assert width is not None, "not a window's bias"
    return width


def _width(where: ir.Node) -> int | None:
    greater = source(where.inputs[0], "Greater")
    last_hidden = greater.inputs[1] if greater else None
    if raised := source(last_hidden, "Unsqueeze"):
        last_hidden = raised.inputs[0]
    difference = source(last_hidden, "Sub")
    width = constant(difference.inputs[1]) if difference else None
    return None if width is None else int(width.item())
