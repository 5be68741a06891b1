"""Export of a PyTorch decoder to the canonical ONNX graph (opset 24), weights in one file beside it.

``export_model`` ensures what the engines require: the tensor names of ``engines.bundle.manifest``, one
Attention and two TensorScatter nodes per layer, standard operators only.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle import manifest as bundle
from outrider.export.checkpoint import ModelFacts, model_facts
from outrider.export.graph.attention_kinds import AttentionKind, check_attention
from outrider.export.graph.fuse import fuse
from outrider.export.graph.kv_export import CanonicalDecoder, translation_table
from outrider.export.graph.narrow_spans import pad_single_queries
from outrider.export.graph.position_tables import tabulate_positions
from outrider.export.weights.mapped import StandIns
from outrider.export.weights.widened import keep_halves
from torch import Tensor
from transformers import PreTrainedModel

OPSET = 24
# Rows of a table of positions; 1 GiB at the widest rotations of today.
_MOST_POSITIONS = 1 << 20
# Operators whose bits depend on an element's place in its tensor on ONNX Runtime's CPU provider (1.31.1,
# AVX-512, measured at 1 to 255 columns of 2 to 600 rows): packs are computed by other code than their rest.
_PLACE_DEPENDENT = frozenset(
    {"Acos", "Asin", "Atan", "Celu", "Cos", "Elu", "Log", "Mish", "Selu", "Sin", "Softplus"}
)
# Logs a warning per operator of torchvision where that is not installed (torch 2.13, unconditionally).
_REGISTRATION = logging.getLogger("torch.onnx._internal.exporter._registration")
# Sizes of the traced example; distinct and above 1, so that no axis is taken for a constant.
_EXAMPLE_BATCH, _EXAMPLE_TOKENS, _EXAMPLE_CAPACITY, _EXAMPLE_WANTED = 2, 5, 11, 3


def export_model(
    model: PreTrainedModel,
    path: Path,
    *,
    num_positions: int | None = None,
    keeps_halves: bool = False,
) -> None:
    """Write the canonical float32 graph of a causal decoder to ``path`` and ``path``.data.

    Args:
        model: an unmodified Transformers decoder, whose weights may be mapped (``weights.mapped``); unchanged
            afterwards.
        path: file to write, for example ``target/model.onnx``; its folder is made.
        num_positions: positions that any column of a call may have, padding included; None for
            all that the model knows.
        keeps_halves: store what the model has in 16 bits so, behind a Cast to float32.

    Raises:
        BundleError: the traced graph is not canonical, computes by operators whose bits depend on the
            batch, or has no limit of positions and is given none.
    """
    facts = model_facts(model.config)
    last = min(facts.max_position, num_positions or facts.max_position)
    if last > _MOST_POSITIONS:
        raise BundleError(f"num_positions: {last} are too many; at most {_MOST_POSITIONS}")
    path.parent.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    stand_ins = StandIns()
    with stand_ins.inside(model):
        decoder = CanonicalDecoder(model.eval(), max_position=last)
        try:
            program = _trace(decoder, facts)
        finally:
            decoder.release()
            model.train(was_training)
    _strip_traces(program.model)
    stand_ins.give_way(program.model.graph)
    fuse(program.model)
    tabulate_positions(program.model.graph, last)
    pad_single_queries(program.model.graph)
    if keeps_halves:
        keep_halves(program.model.graph)
    program.save(str(path), external_data=True)
    check_canonical(path, facts)


def check_canonical(path: Path, facts: ModelFacts) -> None:
    """Refuse a graph that is not canonical.

    Raises:
        BundleError: names the first thing that differs.
    """
    graph = onnx.load(path, load_external_data=False)
    operators = Counter((node.domain, node.op_type) for node in graph.graph.node)
    foreign = sorted(name for domain, name in operators if domain not in ("", "ai.onnx"))
    if foreign or graph.functions:
        raise BundleError(f"{path.name}: operators outside standard ONNX: {foreign}")
    check_attention(path, {AttentionKind.SELF: facts.num_layers})
    if operators["", "TensorScatter"] != 2 * facts.num_layers:
        raise BundleError(
            f"{path.name}: {operators['', 'TensorScatter']} TensorScatter nodes, {2 * facts.num_layers} wanted"
        )
    if placed := sorted(_computed_operators(graph) & _PLACE_DEPENDENT):
        raise BundleError(
            f"{path.name}: operators {placed} round by an element's place in the call, "
            "so that answers would depend on what else is in the batch"
        )
    _check_names(graph, path, facts)


def _computed_operators(graph: onnx.ModelProto) -> set[str]:
    """Return operators that read inputs of a call; all others are folded when the graph is loaded."""
    computed = {value.name for value in graph.graph.input}
    operators = set()
    for node in graph.graph.node:
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
            operators.add(node.op_type)
    return operators


def _check_names(graph: onnx.ModelProto, path: Path, facts: ModelFacts) -> None:
    expected = _input_names(facts.num_layers), _output_names(facts.num_layers)
    inputs = [value.name for value in graph.graph.input]
    outputs = [value.name for value in graph.graph.output]
    if (inputs, outputs) != expected:
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
    """Silence torch's exporter about its own internals and about torchvision, which no decoder uses.

    The graph is checked afterwards instead. Other records of its log pass.
    """

    def is_relevant(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("torchvision is not installed")

    _REGISTRATION.addFilter(is_relevant)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.filterwarnings("ignore", category=category)
            yield
    finally:
        _REGISTRATION.removeFilter(is_relevant)
