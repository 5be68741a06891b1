"""The device sampler's graphs parse on TensorRT; what they answer, the oracle's tests hold.

That every one of them becomes a plan, ``test_to_tensorrt`` shows with the plans of a whole bundle.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.accelerators.device.base import DeviceTensor
from outrider.engines.accelerators.device.sampling.plans import (
    check_call,
    sampler_parts,
    sampler_profile,
)
from outrider.engines.accelerators.device.sampling.tensors import LISTS
from outrider.engines.accelerators.tensorrt.api import RTX, find_api, make_logger
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.accelerators.sampler_graphs import sampler_graphs

from tests.engines.bundle.test_plans import PLAN

V, MAX_GAMMA = 512, 4
GRAPHS = sampler_graphs(vocab_size=V, draft_vocab_size=V, max_gamma=MAX_GAMMA)


def parse(graph: onnx.ModelProto) -> tuple[object, object, list[str]]:
    """Builder and network of a graph, and what the library had to say; one keeps the other alive."""
    api = find_api(RTX)
    errors: list[str] = []
    builder = api.trt.Builder(make_logger(api.trt, errors.append))
    network = builder.create_network(0)
    parser = api.trt.OnnxParser(network, builder.logger)
    assert parser.parse(graph.SerializeToString()), errors
    return builder, network, errors


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_every_graph_parses(name: str) -> None:
    _, network, errors = parse(GRAPHS[name])
    assert errors == []
    assert network.num_inputs == len(GRAPHS[name].graph.input)
    assert network.num_outputs == len(GRAPHS[name].graph.output)


def test_every_open_axis_has_a_range_in_the_profile(tiny_bundle: Path) -> None:
    manifest = load_bundle(tiny_bundle).manifest
    assert sampler_parts(manifest) == tuple(sorted(GRAPHS))
    axes = sampler_profile(manifest, gamma=3, opt_batch=2).axes()
    named = {
        dim.dim_param
        for graph in GRAPHS.values()
        for value in graph.graph.input
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    }
    assert named <= axes.keys()
    assert axes["batch"] == (1, 2, 4)
    assert axes["positions"] == (1, 4, manifest.max_gamma + 1)
    assert (axes["num_seen"], axes["num_allowed"]) == ((1, 1, 256), (1, 1, V))
    assert all(axis.least <= axis.tuned <= axis.most for axis in axes.values())


def call_of(positions: int, **lists: int) -> dict[str, DeviceTensor]:
    """Tensors of a judgement of two rows."""
    shapes = {"draft_tokens": (2, positions), "logits": (2, positions, V)}
    shapes |= {name: (2, *[lists.get(axis, 1) for axis in axes]) for name, axes in LISTS.items()}
    return {name: DeviceTensor(0, shape, np.dtype(np.int64)) for name, shape in shapes.items()}


def test_a_call_outside_the_profile_is_refused_by_profile_and_limit(tiny_bundle: Path) -> None:
    manifest = load_bundle(tiny_bundle).manifest
    profile = sampler_profile(manifest, gamma=4)
    entry = replace(PLAN, part="judge_full.onnx", capacity=0, profiles=(profile,))
    check_call(entry, call_of(manifest.max_gamma + 1, num_bad=128, prefix=32, num_seen=256))
    with pytest.raises(EngineError) as caught:
        check_call(entry, call_of(manifest.max_gamma + 2, num_biases=1024))
    text = str(caught.value)
    assert text.startswith("judge_full.onnx: profile sample: tokens 10 is outside 1..9")
    assert "num_biases 1024 is outside 1..512" in text
