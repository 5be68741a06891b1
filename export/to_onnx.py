"""From a PyTorch decoder to the canonical ONNX graph (opset 24), weights in one file beside it.

``export_model`` ensures what the engines require: the tensor names of ``engines.bundle``, one
Attention and two TensorScatter nodes per layer, standard operators only.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines import bundle
from engines.base import BundleError
from export.checkpoint import ModelFacts, model_facts
from export.fuse import fuse
from export.kv_export import CanonicalDecoder, translation_table
from export.narrow_spans import pad_single_queries

OPSET = 24
# Sizes of the traced example; distinct and above 1, so that no axis is taken for a constant.
_EXAMPLE_BATCH, _EXAMPLE_TOKENS, _EXAMPLE_CAPACITY, _EXAMPLE_WANTED = 2, 5, 11, 3


def export_model(model: PreTrainedModel, path: Path) -> None:
    """Write the canonical float32 graph of a causal decoder to ``path`` and ``path``.data.

    Args:
        model: an unmodified Transformers decoder; unchanged afterwards.
        path: file to write, for example ``target/model.onnx``; its folder is made.

    Raises:
        BundleError: the traced graph is not canonical (the model keeps state elsewhere).
    """
    facts = model_facts(model.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    decoder = CanonicalDecoder(model.eval().float(), max_position=facts.max_position)
    try:
        program = _trace(decoder, facts)
    finally:
        decoder.release()
        model.train(was_training)
    _strip_traces(program.model)
    fuse(program.model)
    pad_single_queries(program.model.graph)
    program.save(str(path), external_data=True)
    check_canonical(path, facts)


def check_canonical(path: Path, facts: ModelFacts) -> None:
    """Refuse a graph that the engines could not run as promised.

    Raises:
        BundleError: names the first thing that differs.
    """
    graph = onnx.load(path, load_external_data=False)
    operators = Counter((node.domain, node.op_type) for node in graph.graph.node)
    foreign = sorted(name for domain, name in operators if domain not in ("", "ai.onnx"))
    if foreign or graph.functions:
        raise BundleError(f"{path.name}: operators outside standard ONNX: {foreign}")
    wanted = {"Attention": facts.num_layers, "TensorScatter": 2 * facts.num_layers}
    for name, count in wanted.items():
        if operators["", name] != count:
            raise BundleError(
                f"{path.name}: {operators['', name]} {name} nodes, {count} wanted; "
                "the model does not attend through the attention interface"
            )
    _check_names(graph, path, facts)


def _check_names(graph: onnx.ModelProto, path: Path, facts: ModelFacts) -> None:
    expected_inputs = _input_names(facts.num_layers)
    expected_outputs = _output_names(facts.num_layers)
    inputs = [value.name for value in graph.graph.input]
    outputs = [value.name for value in graph.graph.output]
    if inputs != expected_inputs or outputs != expected_outputs:
        raise BundleError(f"{path.name}: tensors {inputs} -> {outputs} are not the canonical ones")


def _trace(decoder: CanonicalDecoder, facts: ModelFacts) -> torch.onnx.ONNXProgram:
    batch, tokens, capacity, wanted = (
        torch.export.Dim(name, min=1, max=1 << 20)
        for name in ("batch", "tokens", "capacity", "wanted")
    )
    cache_axes = [{0: batch, 2: capacity}] * facts.num_layers
    with _known_warnings(), torch.no_grad():
        program = torch.onnx.export(
            decoder,
            _example(facts),
            dynamo=True,
            opset_version=OPSET,
            input_names=_input_names(facts.num_layers),
            output_names=_output_names(facts.num_layers),
            dynamic_shapes=(
                {0: batch, 1: tokens},
                {0: batch},
                {0: batch, 1: wanted},
                cache_axes,
                cache_axes,
            ),
            custom_translation_table=translation_table(),
            external_data=True,
            verbose=False,
        )
    assert program is not None
    return program


def _strip_traces(model: ir.Model) -> None:
    """Drop the exporter's notes (stack traces with paths of this machine) from the graph."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _example(facts: ModelFacts) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    shape = (_EXAMPLE_BATCH, facts.num_kv_heads, _EXAMPLE_CAPACITY, facts.head_size)
    return (
        torch.ones(_EXAMPLE_BATCH, _EXAMPLE_TOKENS, dtype=torch.int64),
        torch.arange(_EXAMPLE_BATCH, dtype=torch.int64),
        torch.ones(_EXAMPLE_BATCH, _EXAMPLE_WANTED, dtype=torch.int64),
        [torch.zeros(shape) for _ in range(facts.num_layers)],
        [torch.zeros(shape) for _ in range(facts.num_layers)],
    )


def _input_names(num_layers: int) -> list[str]:
    layers = range(num_layers)
    names = [bundle.TOKENS, bundle.START, bundle.LOGIT_POSITIONS]
    return [*names, *map(bundle.key_name, layers), *map(bundle.value_name, layers)]


def _output_names(num_layers: int) -> list[str]:
    layers = range(num_layers)
    names = [*map(bundle.new_key_name, layers), *map(bundle.new_value_name, layers)]
    return [bundle.LOGITS, *names]


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence what torch's exporter says of its own internals; the result is checked instead."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.filterwarnings("ignore", category=category)
        yield
