"""Whether ONNX Runtime's integer products are right on this processor."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import helper, numpy_helper
from outrider.engines.onnx.session import open_session

LENGTH = 64


@cache
def overflow() -> bool:
    """Whether sums of two products of 8 bits are cut to 16, by asking the library."""
    constants = {"w": np.full((LENGTH, 1), 127, np.int8), "zero": np.uint8(0)}
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w", "zero"], ["y"])],
        "sums",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, LENGTH])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1, 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = open_session(model.SerializeToString())
    (found,) = session.run(None, {"x": np.full((1, LENGTH), 255, np.uint8)})
    return int(found[0, 0]) != LENGTH * 255 * 127
