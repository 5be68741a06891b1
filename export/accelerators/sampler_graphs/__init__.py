"""The device sampler as standard ONNX graphs: propose, judge, shared noise, log-probabilities.

TensorRT's parser refuses or limits TopK beyond a few thousand entries, Sort, NonZero, bitwise operators, unsigned
integers, float64, scatters that add, and control flow. The graphs do without: they use arithmetic and comparisons in
float32, int32 and int64, reductions, running sums, gathers and plain scatters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from outrider.engines.accelerators.device.sampling.tensors import (
    LOGPROBS_FILE,
    MAX_VOCAB_SIZE,
    NOISE_FILE,
    Variant,
    judge_file,
    kept_depth,
    propose_file,
)
from outrider.engines.base import BundleError
from outrider.export.accelerators.sampler_graphs.judge import judge_graph
from outrider.export.accelerators.sampler_graphs.logprobs import logprobs_graph
from outrider.export.accelerators.sampler_graphs.noise import noise_graph
from outrider.export.accelerators.sampler_graphs.propose import propose_graph


def sampler_graphs(
    *, vocab_size: int, draft_vocab_size: int | None, max_gamma: int
) -> Mapping[str, onnx.ModelProto]:
    """Return all graphs of a sampler by file name; without a draft model none proposes.

    Raises:
        BundleError: the vocabulary is too large for the sampler's integers.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise BundleError(f"vocab_size {vocab_size}: sampler graphs hold at most {MAX_VOCAB_SIZE}")
    depth = kept_depth(max_gamma)
    graphs = {
        LOGPROBS_FILE: logprobs_graph(vocab_size=vocab_size),
        NOISE_FILE: noise_graph(vocab_size=vocab_size),
    }
    for variant in Variant:
        graphs[judge_file(variant)] = judge_graph(variant, vocab_size=vocab_size, depth=depth)
        if draft_vocab_size is not None:
            graphs[propose_file(variant)] = propose_graph(
                variant, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, depth=depth
            )
    return graphs


def write_sampler_graphs(
    folder: Path, *, vocab_size: int, draft_vocab_size: int | None, max_gamma: int
) -> None:
    """Write all graphs of a sampler into a new folder."""
    folder.mkdir(parents=True)
    graphs = sampler_graphs(
        vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, max_gamma=max_gamma
    )
    for name, model in graphs.items():
        onnx.save_model(model, folder / name)
