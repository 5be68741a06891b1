"""What ONNX Runtime's PagedAttention asks of CUDA, beside the attention of device graphs, over stub libraries.

    python -m scripts.gpu.stubs.paged

One layer's attention with its caches, heads of 64, 8 rows of 5 tokens: as the device graphs have it (caches written by
TensorScatter, rows padded to one width), and over packed rows with a table of blocks. Counts are the provider's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import typer
from onnx import TensorProto, helper
from outrider.engines.onnx.session import enqueue

from scripts.gpu.stubs.environment import make_environment, variables
from scripts.tools.results import Row
from scripts.tools.tables import markdown

_ROWS, _TOKENS, _CAPACITY, _BLOCK = 8, 5, 1024, 256
_HEADS, _KV_HEADS, _SIZE = 32, 8, 64
_QUERY, _KEY = _HEADS * _SIZE, _KV_HEADS * _SIZE
_HALF, _LONG, _INT = TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32
_NUMPY = {_HALF: np.float16, _LONG: np.int64, _INT: np.int32}
Tensors = Mapping[str, tuple[int, tuple[int, ...]]]


def padded() -> tuple[Sequence[Any], Tensors, Tensors]:
    """Nodes, inputs and outputs of a layer's attention in device graphs."""
    cache = (_HALF, (_ROWS, _CAPACITY, _KEY))
    inputs = {
        "query": (_HALF, (_ROWS, _TOKENS, _QUERY)), "key": (_HALF, (_ROWS, _TOKENS, _KEY)),
        "value": (_HALF, (_ROWS, _TOKENS, _KEY)), "keys": cache, "values": cache,
        "start": (_LONG, (_ROWS,)), "lengths": (_LONG, (_ROWS,)),
    }  # fmt: skip
    heads = {"q_num_heads": _HEADS, "kv_num_heads": _KV_HEADS}
    nodes = [
        helper.make_node("TensorScatter", ["keys", "key", "start"], ["new_keys"], axis=1),
        helper.make_node("TensorScatter", ["values", "value", "start"], ["new_values"], axis=1),
        helper.make_node(
            "Attention", ["query", "new_keys", "new_values", "", "", "", "lengths"], ["out"], is_causal=1, **heads
        ),
    ]  # fmt: skip
    outputs = {"out": inputs["query"], "new_keys": cache, "new_values": cache}
    return nodes, inputs, outputs


def paged(*, has_metadata: bool) -> tuple[Sequence[Any], Tensors, Tensors]:
    """The same over packed rows; with metadata the host says the longest span and text."""
    count = _ROWS * _TOKENS
    blocks = _ROWS * _CAPACITY // _BLOCK
    cache = (_HALF, (blocks, _BLOCK, _KV_HEADS, _SIZE))
    inputs = {
        "query": (_HALF, (count, _QUERY)), "key": (_HALF, (count, _KEY)), "value": (_HALF, (count, _KEY)),
        "keys": cache, "values": cache, "ends": (_INT, (_ROWS + 1,)), "past": (_INT, (_ROWS,)),
        "table": (_INT, (_ROWS, _CAPACITY // _BLOCK)),
    }  # fmt: skip
    names = [*inputs, *[""] * 8]
    if has_metadata:
        inputs["metadata"] = (_INT, (2,))
        names.append("metadata")
    node = helper.make_node(
        "PagedAttention", names, ["out", "new_keys", "new_values"], domain="com.microsoft", num_heads=_HEADS,
        kv_num_heads=_KV_HEADS,
    )  # fmt: skip
    return [node], inputs, {"out": inputs["query"], "new_keys": cache, "new_values": cache}


def count(nodes: Sequence[Any], inputs: Tensors, outputs: Tensors) -> Counter[str]:
    """Run a graph of these nodes twice, and count the events of the second run."""
    from scripts.gpu.stubs.provider import StubDevice

    device = StubDevice()
    values = [
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, (kind, shape) in tensors.items()
        ]
        for tensors in (inputs, outputs)
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "attention", *values),
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)],
        ir_version=11,
    )
    options = {"user_compute_stream": str(device.stream), "sdpa_kernel": "19"}
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=[("CUDAExecutionProvider", options)]
    )
    binding, pointers = session.io_binding(), dict[str, int]()
    for name, (kind, shape) in (inputs | outputs).items():
        num_bytes = int(np.prod(shape)) * np.dtype(_NUMPY[kind]).itemsize
        pointers[name] = pointers.get(name.removeprefix("new_")) or device.allocate(num_bytes)
        bind = binding.bind_input if name in inputs else binding.bind_output
        bind(name, *_place(name, device), _NUMPY[kind], shape, pointers[name])
    for _ in range(2):
        device.take_events()
        enqueue(session, binding)
    words = (event.split() for event in device.take_events())
    return Counter(" ".join(one[: 2 if "copy" in one[0] else 1]) for one in words)


def _place(name: str, device: Any) -> tuple[str, int]:
    return ("cpu", 0) if name == "metadata" else (device.kind, device.index)


def main() -> None:
    """Print the table."""
    if os.environ.get("LD_LIBRARY_PATH") != variables()["LD_LIBRARY_PATH"]:
        make_environment()
        command = [sys.executable, "-m", "scripts.gpu.stubs.paged"]
        raise typer.Exit(subprocess.run(command, env=variables()).returncode)
    cases = {
        "device graphs: padded rows": padded(),
        "PagedAttention": paged(has_metadata=False),
        "PagedAttention, attention_metadata": paged(has_metadata=True),
    }
    rows = []
    for name, graph in cases.items():
        events = count(*graph)
        figures = {
            "launches": events["launch"],
            "copies on the device": events["copy device_to_device"] + events["set"],
            "copies to the host": events["copy device_to_host"],
            "waits": sum(found for event, found in events.items() if event.startswith("wait")),
        }
        rows.append(Row(case={"attention of a layer": name}, figures=figures))
    typer.echo(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
