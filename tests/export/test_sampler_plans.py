"""The device sampler's graphs parse and build on TensorRT; what they answer, the oracle's tests hold."""

import onnx
import pytest

from engines.tensorrt_api import RTX, find_api, make_logger
from export.sampler_graphs import sampler_graphs

V, MAX_GAMMA = 512, 4
GRAPHS = sampler_graphs(vocab_size=V, draft_vocab_size=V, max_gamma=MAX_GAMMA)
# The others have some 2,000 layers and build for 15 s and more; they are parsed.
BUILT = sorted(name for name in GRAPHS if "full" not in name and "race" not in name)


def parse(graph: onnx.ModelProto) -> tuple[object, object, list[str]]:
    """Builder and network of a graph, and what the library had to say."""
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


@pytest.mark.parametrize("name", BUILT)
def test_a_graph_becomes_a_plan(name: str) -> None:
    api = find_api(RTX)
    builder, network, errors = parse(GRAPHS[name])
    config = builder.create_builder_config()
    api.set_compute_capability(config, "8.0")
    profile = builder.create_optimization_profile()
    for value in GRAPHS[name].graph.input:
        dims = value.type.tensor_type.shape.dim
        least, most = (
            tuple(size if dim.dim_param else dim.dim_value for dim in dims)
            for size in (1, MAX_GAMMA + 1)
        )
        profile.set_shape(value.name, least, most, most)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None, errors
