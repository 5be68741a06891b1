"""Export of a PyTorch model to its canonical ONNX graphs (opset 24), weights in one file beside each.

A decoder becomes one graph; a model with an encoder becomes two, ``encode.onnx`` beside that of the decoder.
``export_model`` ensures what the engines require: the tensor names of ``engines.bundle``, one Attention and two
TensorScatter nodes per layer, a second Attention where a layer attends to a source, standard operators only.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE
from outrider.engines.bundle.states import StatesEntry
from outrider.export.gguf.keep import keep_blocks
from outrider.export.graph.attention_kinds import (
    AttentionKind,
    check_attention,
    drop_unread_outputs,
)
from outrider.export.graph.fuse import fuse
from outrider.export.graph.narrow_spans import pad_single_queries
from outrider.export.graph.position_tables import tabulate_positions
from outrider.export.graph.tracing import experts, kv_export, latents, mixers, stack_tables, windows
from outrider.export.graph.tracing.angles import original_angles
from outrider.export.graph.tracing.encoder_decoder import SourcedDecoder, SourceReader
from outrider.export.graph.tracing.experts import forget_row_counts, separate_experts
from outrider.export.graph.tracing.kv_export import (
    CanonicalDecoder,
    FeaturedDecoder,
    taken_over,
)
from outrider.export.graph.tracing.latents import angles_without_complex
from outrider.export.graph.tracing.mixers import (
    MICROSOFT,
    OPERATORS,
    Mixers,
    measure_tokens,
    replaced,
)
from outrider.export.graph.tracing.probe import mixer_sizes
from outrider.export.graph.tracing.signatures import (
    Signature,
    decoder_signature,
    encode_signature,
    head_signature,
)
from outrider.export.graph.tracing.stack_tables import by_tables
from outrider.export.graph.tracing.taps import Taps
from outrider.export.graph.tracing.windows import Windows
from outrider.export.model_config import EncoderConfig, ModelConfig, read_model_config
from outrider.export.weights.mapped import StandIns
from outrider.export.weights.widened import keep_halves
from torch import nn
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


def export_model(
    model: PreTrainedModel,
    path: Path,
    *,
    num_positions: int | None = None,
    num_source_positions: int | None = None,
    max_open: int = 1,
    keeps_halves: bool = False,
    keeps_blocks: bool = False,
    taps: Taps | None = None,
) -> None:
    """Write the canonical float32 graph of a causal decoder to ``path`` and ``path``.data.

    That of an encoder, where there is one, is written beside it as ``encode.onnx`` with a data file of its own.

    Args:
        model: an unmodified Transformers model, whose weights may be mapped (``weights.mapped``); unchanged
            afterwards.
        path: file to write, for example ``target/model.onnx``; its folder is made.
        num_positions: positions that any column of a call may have, padding included; None for
            all that the model knows.
        num_source_positions: tokens of a source at most; None for all positions that the encoder knows.
        max_open: tokens behind a settled text that may be rejected, where the model keeps recurrent states.
        keeps_halves: store what the model has in 16 bits so, behind a Cast to float32.
        keeps_blocks: store what the model has in blocks of a GGUF file so (``gguf.keep``).
        taps: have features that a head reads cached too.

    Raises:
        BundleError: a traced graph is not canonical, has no layers to tap, computes by operators whose bits depend on
            the batch, or has no limit of positions and is given none.
    """
    model_config = read_model_config(model.config)
    last = min(model_config.max_position, num_positions or model_config.max_position)
    if last > _MOST_POSITIONS:
        raise BundleError(f"num_positions: {last} are too many; at most {_MOST_POSITIONS}")
    path.parent.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    model.eval()
    try:
        if model_config.source is None:
            states = mixer_sizes(model.config, model_config, max_open)
            program = _decoder_program(model, path, states, last, taps)
            if keeps_blocks:
                keep_blocks(program.model.graph)
            _save(program, path, keeps_halves=keeps_halves)
            if taps is not None:
                model_config = model_config.with_features(taps.size)
            check_canonical(path, model_config, states)
        else:
            most = min(model_config.source.max_source, num_source_positions or _MOST_POSITIONS)
            _export_text2text(model, path, (last, most), keeps_halves=keeps_halves)
    finally:
        model.train(was_training)


def _decoder_program(
    model: PreTrainedModel,
    path: Path,
    states: StatesEntry | None,
    num_positions: int,
    taps: Taps | None,
) -> torch.onnx.ONNXProgram:
    """Return a causal decoder as it is written to ``path``; ``states`` is what its mixers keep."""
    model_config = read_model_config(model.config)
    if taps is not None:
        model_config = model_config.with_features(taps.size)
    stand_ins, seen = StandIns(), Windows(num_positions)
    with canonical_decoder(model, seen, num_positions, taps) as decoder, stand_ins.inside(model):
        program = _trace(decoder, decoder_signature(model_config, states))
    if reason := seen.why_not(model_config.window):
        raise BundleError(f"{path.parent.name}: {reason}")
    if states is not None:
        measure_tokens(program.model.graph)
    _rewrite(program, num_positions, stand_ins)
    return program


@contextmanager
def canonical_decoder(
    model: PreTrainedModel, seen: Windows, num_positions: int, taps: Taps | None = None
) -> Iterator[CanonicalDecoder]:
    """Let a causal model be what is traced of it, which PyTorch runs too."""
    kinds = read_model_config(model.config).kinds
    mixed = None if kinds is None else Mixers(kinds)
    with (
        separate_experts(model),
        replaced(model, mixed),
        angles_without_complex(model),
        original_angles(model),
        taken_over(model, seen) as head,
        nullcontext() if taps is None else taps.inside(model),
    ):
        yield CanonicalDecoder(
            model,
            head,
            seen,
            max_position=num_positions,
            mixers=mixed,
            write_features=None if taps is None else taps.write,
        )


def export_head(model: PreTrainedModel, path: Path, size: int, num_positions: int) -> None:
    """Write the graph of a head, ``heads.model.Head``, that reads ``size`` numbers beside each token.

    Raises:
        BundleError: the traced graph is not canonical.
    """
    model_config = read_model_config(model.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    stand_ins, seen = StandIns(), Windows(num_positions)
    signature = head_signature(model_config, size)
    with original_angles(model), taken_over(model, seen) as projection:
        decoder = CanonicalDecoder(model, projection, seen, max_position=num_positions)
        program = _trace(FeaturedDecoder(decoder), signature)
    _rewrite(program, num_positions, stand_ins)
    _save(program, path, keeps_halves=False)
    _check_graph(path, {AttentionKind.SELF: 1}, 2, signature)


def _export_text2text(
    model: PreTrainedModel, path: Path, limits: tuple[int, int], *, keeps_halves: bool
) -> None:
    """Write both graphs of a model with an encoder, for so many positions of texts and of sources."""
    model_config = read_model_config(model.config)
    assert model_config.source is not None
    encode_path, stand_ins = path.with_name(ENCODE_FILE), StandIns()
    num_positions, num_source_positions = limits
    with (
        by_tables(model.get_decoder(), num_positions) as text,
        by_tables(model.get_encoder(), num_source_positions) as source,
        stand_ins.inside(model),
        taken_over(model) as head,
    ):
        decoder = SourcedDecoder(model, head, text, max_position=num_positions)
        program = _trace(decoder, decoder_signature(model_config))
        _rewrite(program, num_positions, stand_ins)
        _save(program, path, keeps_halves=keeps_halves)
        reader = SourceReader(model, head, source, text, max_source=num_source_positions)
        program = _trace(reader, encode_signature(model_config, model_config.source))
        _rewrite(program, num_source_positions, stand_ins)
        _save(program, encode_path, keeps_halves=keeps_halves)
    check_canonical(path, model_config)
    check_canonical_encoder(encode_path, model_config, model_config.source)


def _rewrite(program: torch.onnx.ONNXProgram, num_positions: int, stand_ins: StandIns) -> None:
    """Rewrite a traced graph to its canonical form."""
    _strip_traces(program.model)
    stand_ins.give_way(program.model.graph)
    drop_unread_outputs(program.model.graph)
    forget_row_counts(program.model.graph)
    fuse(program.model)
    tabulate_positions(program.model.graph, num_positions)
    pad_single_queries(program.model.graph)


def _save(program: torch.onnx.ONNXProgram, path: Path, *, keeps_halves: bool) -> None:
    if keeps_halves:
        keep_halves(program.model.graph)
    program.save(str(path), external_data=True)


def check_canonical(
    path: Path, model_config: ModelConfig, states: StatesEntry | None = None
) -> None:
    """Refuse a decoder's graph that is not canonical.

    Raises:
        BundleError: names the first thing that differs.
    """
    kinds = {AttentionKind.SELF: model_config.num_attending}
    if model_config.source is not None:
        kinds[AttentionKind.SOURCE] = model_config.num_layers
    num_scattered = 2 * model_config.num_layers
    _check_graph(path, kinds, num_scattered, decoder_signature(model_config, states), states)


def check_canonical_encoder(path: Path, model_config: ModelConfig, source: EncoderConfig) -> None:
    """Refuse an encoder's graph that is not canonical.

    Raises:
        BundleError: names the first thing that differs.
    """
    kinds = {AttentionKind.ENCODER: source.num_layers}
    _check_graph(path, kinds, 2 * model_config.num_layers, encode_signature(model_config, source))


def _check_graph(
    path: Path,
    kinds: Mapping[AttentionKind, int],
    num_scattered: int,
    signature: Signature,
    states: StatesEntry | None = None,
) -> None:
    graph = onnx.load(path, load_external_data=False)
    operators = Counter((node.domain, node.op_type) for node in graph.graph.node)
    known = {(MICROSOFT, name) for name in OPERATORS} if states is not None else set()
    foreign = sorted(
        name for domain, name in operators.keys() - known if domain not in ("", "ai.onnx")
    )
    if foreign or graph.functions:
        raise BundleError(f"{path.name}: operators outside standard ONNX: {foreign}")
    check_attention(path, kinds)
    if operators["", "TensorScatter"] != num_scattered:
        raise BundleError(
            f"{path.name}: {operators['', 'TensorScatter']} TensorScatter nodes, {num_scattered} wanted"
        )
    if placed := sorted(_computed_operators(graph) & _PLACE_DEPENDENT):
        raise BundleError(
            f"{path.name}: operators {placed} round by an element's place in the call, "
            "so that answers would depend on what else is in the batch"
        )
    inputs = tuple(value.name for value in graph.graph.input)
    outputs = tuple(value.name for value in graph.graph.output)
    if (inputs, outputs) != (signature.inputs, signature.outputs):
        raise BundleError(f"{path.name}: tensors {inputs} -> {outputs} are not the canonical ones")


def _computed_operators(graph: onnx.ModelProto) -> set[str]:
    """Return operators that read inputs of a call; all others are folded when the graph is loaded."""
    computed = {value.name for value in graph.graph.input}
    operators = set()
    for node in graph.graph.node:
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
            operators.add(node.op_type)
    return operators


def _trace(module: nn.Module, signature: Signature) -> torch.onnx.ONNXProgram:
    with _known_warnings(), torch.no_grad():
        program = torch.onnx.export(
            module,
            signature.example,
            dynamo=True,
            opset_version=OPSET,
            input_names=signature.inputs,
            output_names=signature.outputs,
            dynamic_shapes=signature.axes,
            custom_translation_table=kv_export.translation_table()
            | stack_tables.translation_table()
            | windows.translation_table()
            | experts.translation_table()
            | latents.translation_table()
            | mixers.translation_table(),
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


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence torch's exporter about its own internals and about torchvision, which no text model uses.

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
