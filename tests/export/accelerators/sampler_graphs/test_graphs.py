"""The sampler's graph files: what is in them, and what must not be."""

from __future__ import annotations

import numpy as np
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import Variant
from outrider.engines.onnx.session import open_session
from outrider.engines.sampling.noise import CounterNoise
from outrider.export.accelerators.sampler_graphs import sampler_graphs
from outrider.export.accelerators.sampler_graphs.noise import noise_graph

MAX_ERROR = 1e-6

# What TensorRT's parser refuses, or caps, or what would branch.
FORBIDDEN = {
    "TopK",
    "Sort",
    "NonZero",
    "Unique",
    "Compress",
    "If",
    "Loop",
    "Scan",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "BitwiseNot",
    "Multinomial",
    "RandomUniform",
    "ArgMax",
    "ArgMin",
}


def test_no_graph_uses_what_tensorrt_lacks_or_caps():
    allowed_types = {1, 6, 7, 9}  # float, int32, int64, bool
    graphs = sampler_graphs(vocab_size=50, draft_vocab_size=40, max_gamma=3)
    assert len(graphs) == 2 * len(Variant) + 2
    for name, model in graphs.items():
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
        assert not {node.op_type for node in model.graph.node} & FORBIDDEN, name
        assert {tensor.data_type for tensor in model.graph.initializer} <= allowed_types
        casts = [n.attribute[0].i for n in model.graph.node if n.op_type == "Cast"]
        assert set(casts) <= allowed_types
        for node in model.graph.node:
            if node.op_type.startswith("Scatter"):
                assert "reduction" not in {attribute.name for attribute in node.attribute}
        for tensor in (*model.graph.input, *model.graph.output):
            assert tensor.type.tensor_type.HasField("shape"), tensor.name
        assert model.ByteSize() < 200_000


def test_the_noise_graph_draws_the_words_of_the_noise(tmp_path):
    path = tmp_path / names.NOISE_FILE
    path.write_bytes(noise_graph(vocab_size=50).SerializeToString())
    session = open_session(path)
    seeds, positions = [7, 2**64 - 1, 2**63 + 12345], [[0, 5], [9, 100_000], [3, 4]]
    limbs = [[(seed >> (16 * i)) & 0xFFFF for i in range(names.SEED_LIMBS)] for seed in seeds]
    feeds = {names.SEEDS: np.array(limbs), names.POSITIONS: np.array(positions)}
    (drawn,) = session.run([names.RACES], feeds)
    for seed, row, row_positions in zip(seeds, drawn, positions, strict=True):
        for values, position in zip(row, row_positions, strict=True):
            expected = CounterNoise().exponentials(seed, position, 50)
            # A word that differed in any but its last bits would be further off.
            assert np.abs(values / expected - 1.0).max() < MAX_ERROR
