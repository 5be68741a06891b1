"""TensorRT-RTX takes the sampler's graphs: every one parses, and plans build without a GPU."""

import pytest

from engines import sampler_tensors as names
from engines.sampler_tensors import LOGPROBS_FILE, Variant, judge_file, propose_file
from engines.tensorrt_api import RTX, find_api
from export.sampler_graphs import sampler_graphs

API = find_api(RTX)
GRAPHS = sampler_graphs(vocab_size=64, draft_vocab_size=48, max_gamma=4)
# Least, usual and greatest length of every axis that is not fixed.
AXES = {
    "batch": (1, 2, 4),
    "positions": (1, 3, 5),
    "wanted": (1, 2, 2),
    "prefix": (1, 2, 4),
    "num_seen": (1, 16, 64),
    "num_biases": (1, 1, 8),
    "num_allowed": (1, 1, 8),
    "num_ends": (1, 2, 8),
    "num_bad": (1, 1, 8),
}


class Parsed:
    """A graph as TensorRT-RTX understood it; holds what must outlive the network."""

    def __init__(self, name):
        trt = API.trt
        self.logger = trt.Logger(trt.Logger.ERROR)
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(
            1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        )
        self.parser = trt.OnnxParser(self.network, self.logger)
        is_parsed = self.parser.parse(GRAPHS[name].SerializeToString())
        errors = [self.parser.get_error(i).desc() for i in range(self.parser.num_errors)]
        assert is_parsed, errors

    def layer_types(self):
        return [self.network.get_layer(i).type.name for i in range(self.network.num_layers)]

    def build(self, name):
        """A plan for compute capability 8.0, or None."""
        config = self.builder.create_builder_config()
        API.set_compute_capability(config, "8.0")
        profile = self.builder.create_optimization_profile()
        for tensor in GRAPHS[name].graph.input:
            dims = [d.dim_param or d.dim_value for d in tensor.type.tensor_type.shape.dim]
            sizes = [[AXES[d][i] if isinstance(d, str) else d for d in dims] for i in range(3)]
            profile.set_shape(tensor.name, *sizes)
        config.add_optimization_profile(profile)
        return self.builder.build_serialized_network(self.network, config)


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_every_sampler_graph_parses_without_a_topk(name):
    types = Parsed(name).layer_types()
    assert "TOPK" not in types
    keeps = [tensor.name for tensor in GRAPHS[name].graph.output]
    assert types.count("KV_CACHE_UPDATE") == (names.NEW_KEPT_ROWS in keeps)


@pytest.mark.parametrize(
    "name",
    [
        propose_file(Variant.GREEDY),
        judge_file(Variant.GREEDY),
        propose_file(Variant.PLAIN),
        judge_file(Variant.PLAIN),
        propose_file(Variant.FULL),
        LOGPROBS_FILE,
    ],
)
def test_plans_of_sampler_graphs_build_ahead_of_time(name):
    plan = Parsed(name).build(name)
    assert plan is not None
    assert plan.nbytes > 10_000
