"""The graph of log-probabilities under the target's unadjusted softmax."""

from __future__ import annotations

import onnx
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import FRACTION_BITS, MAX_TOP_LOGPROBS
from outrider.export.accelerators.sampler_graphs.builder import FLOAT, INT64, Graph
from outrider.export.accelerators.sampler_graphs.truncate import to_fixed

_LOWEST = -3.4028234663852886e38


def logprobs_graph(*, vocab_size: int) -> onnx.ModelProto:
    """Return the graph of log-softmax at given tokens and at the greatest entries, ties by lower id.

    The greatest entries are taken one after the other: TensorRT's TopK is limited, and few are
    wanted, by few requests.
    """
    graph = Graph("logprobs")
    logits = graph.input(names.LOGITS, FLOAT, ["batch", "positions", vocab_size])
    tokens = graph.input(names.EMITTED, INT64, ["batch", "positions"]).unsqueeze(2)
    below = logits - logits.max()
    total = to_fixed(graph.op("Exp", below)).sum().cast(FLOAT) * 2.0**-FRACTION_BITS
    norm = graph.op("Log", total)
    graph.output(names.LOGPROBS, (below.pick(tokens) - norm).squeeze(2), ["batch", "positions"])
    ids = graph.ids(vocab_size)
    # Taken entries fall to -inf, so banned ones must stay above it to be taken later.
    left = graph.op("Max", logits, _LOWEST)
    taken = []
    for _ in range(min(MAX_TOP_LOGPROBS, vocab_size)):
        greatest = left.argmax(vocab_size)
        taken.append(greatest)
        left = ids.equals(greatest).where(float("-inf"), left)
    tops = graph.concat(taken, 2)
    shape: list[int | str] = ["batch", "positions", len(taken)]
    graph.output(names.TOP_IDS, tops, shape)
    graph.output(names.TOP_LOGPROBS, below.pick(tops) - norm, shape)
    return graph.model()
