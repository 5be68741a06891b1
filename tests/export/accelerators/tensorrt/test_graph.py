"""The graphs made for TensorRT answer as the canonical ones, and become plans with native caches."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from outrider.engines.accelerators.tensorrt.api import RTX, TensorRtApi, find_api, make_logger
from outrider.engines.base import BundleError, EngineError, FloatArray
from outrider.engines.bundle.plans import Profile, Range, derive_profiles
from outrider.engines.onnx.session import open_session
from outrider.export.accelerators.tensorrt.graph import derive_graph
from outrider.export.accelerators.tensorrt.network import (
    AttentionFacts,
    NetworkFacts,
    PlanJob,
    build_plan,
    cache_updates,
    check_network,
    parse_graph,
    read_network,
)
from outrider.export.graph.position_tables import is_position_table
from outrider.export.graph.to_onnx import export_model
from outrider.export.model_config import read_model_config
from outrider.export.weights.blocks import quantize_file
from outrider.export.weights.w8a8 import quantize_static
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[4]
NUM_LAYERS, V, CAPACITY = 2, 128, 24
FAMILIES = {
    "gpt2": {"n_embd": 64, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 96, "vocab_size": V},
    "qwen3": {
        "vocab_size": V,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
        "initializer_range": 0.1,
        # The second layer sees six tokens.
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
}
ALL = ("llama", *FAMILIES)
# Largest |logit difference| to float32; the logits' own size is up to 4.
TOLERANCES = {"float32": 1e-5, "float16": 4e-2, "float8": 1.0}
# Of keys, values and logits.
CACHE_TYPES = {"float32": np.float32, "float16": np.float16, "float8": np.float16}


@pytest.fixture(scope="module")
def graphs(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Canonical graphs of tiny models of two layers, by family."""
    root = tmp_path_factory.mktemp("graphs")
    paths = {"llama": tiny_bundle / "target" / "model.onnx"}
    for family, sizes in FAMILIES.items():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        paths[family] = root / family / "model.onnx"
        export_model(model, paths[family])
    return paths


def run_graph(path: Path, session: Any = None, *, num_heads: int = 0) -> dict[str, FloatArray]:
    """Outputs of a ragged extend over caches that hold noise beyond each row's length; of a session over the graph.

    With ``num_heads`` the graph's caches are by token; they hold the same noise, and are returned with heads first.
    """
    session = session or open_session(path, copies_caches=True)
    rng = np.random.default_rng(3)
    feeds = {
        "tokens": rng.integers(0, V, (2, 5)),
        "start": np.array([7, 0]),
        "lengths": np.array([12, 5]),
        "logit_positions": np.tile(np.arange(5), (2, 1)),
    }
    inputs = session.get_inputs()
    if all(value.name != "lengths" for value in inputs):
        del feeds["lengths"]
    for value in inputs:
        if value.name not in feeds:
            kind = np.float16 if value.type == "tensor(float16)" else np.float32
            heads = num_heads or value.shape[1]
            size = value.shape[-1] // (num_heads or 1)
            noise = rng.normal(size=(2, heads, CAPACITY, size)).astype(kind)
            is_by_token = len(value.shape) == 3
            assert is_by_token == bool(num_heads)
            by_token = noise.transpose(0, 2, 1, 3).reshape(2, CAPACITY, -1)
            feeds[value.name] = by_token if is_by_token else noise
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    if num_heads:
        for name in set(found) - {"logits"}:
            by_token = found[name].reshape(2, CAPACITY, num_heads, -1)
            found[name] = by_token.transpose(0, 2, 1, 3)
    return found


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("family", ALL)
def test_a_derived_graph_answers_as_the_canonical_one(
    graphs: dict[str, Path], family: str, precision: str, tmp_path: Path
) -> None:
    out = tmp_path / "model.onnx"
    derive_graph(graphs[family], out, capacity=CAPACITY, precision=precision)
    found, expected = run_graph(out), run_graph(graphs[family])
    assert found["logits"].dtype == np.float32
    assert found["new_key.1"].dtype == CACHE_TYPES[precision]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCES[precision])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_sixteen_bits_are_in_the_weights_and_not_in_the_norms(
    graphs: dict[str, Path], precision: str, tmp_path: Path
) -> None:
    out = tmp_path / "model.onnx"
    derive_graph(graphs["llama"], out, capacity=CAPACITY, precision=precision)
    half = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[precision]
    graph = onnx.shape_inference.infer_shapes(onnx.load(out)).graph
    kinds = {value.name: value.data_type for value in graph.initializer}
    matrices = {value.name for value in graph.initializer if len(value.dims) == 2}
    tables = set(filter(is_position_table, matrices))
    assert {kinds[name] for name in matrices - tables} == {half}
    assert {kinds[name] for name in tables} == {onnx.TensorProto.FLOAT}
    inferred = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    outputs = {node.output[0]: node.op_type for node in graph.node}
    by_operator = {
        kind: set() for kind in ("MatMul", "Attention", "RMSNormalization", "RotaryEmbedding")
    }
    for name, operator in outputs.items():
        if operator in by_operator and name in inferred:
            by_operator[operator].add(inferred[name])
    assert by_operator.pop("MatMul") == by_operator.pop("Attention") == {half}
    assert set().union(*by_operator.values()) == {onnx.TensorProto.FLOAT}


def test_weights_of_products_are_stored_in_eight_bits(
    graphs: dict[str, Path], tmp_path: Path
) -> None:
    half, narrow = tmp_path / "half.onnx", tmp_path / "narrow.onnx"
    derive_graph(graphs["qwen3"], half, capacity=CAPACITY, precision="float16")
    derive_graph(graphs["qwen3"], narrow, capacity=CAPACITY, precision="float8")
    expected, found = (
        {value.name: value for value in onnx.load(path).graph.initializer}
        for path in (half, narrow)
    )
    stored = {name.removesuffix(".float8") for name in found if name.endswith(".float8")}
    # Of each layer the joined projection of the inputs, the outputs', and the three of the MLP.
    assert len(stored) >= 4 * NUM_LAYERS
    for name in stored:
        exact = onnx.numpy_helper.to_array(expected[name]).astype(np.float32)
        weight = found[f"{name}.float8"]
        assert weight.data_type == onnx.TensorProto.FLOAT8E4M3FN
        scales = onnx.numpy_helper.to_array(found[f"{name}.scales"]).astype(np.float32)
        values = onnx.numpy_helper.to_array(weight).astype(np.float32) * scales
        # Three bits of fraction, and subnormal numbers below a 28,000th of the greatest.
        limit = np.abs(exact) * 2**-4 + np.abs(exact).max(axis=0) * 2**-15
        assert (np.abs(values - exact) <= limit).all()
        assert name not in found


def test_quantised_weights_are_not_narrowed_again(graphs: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source.onnx"
    onnx.save(onnx.load(graphs["llama"]), source)
    quantize_file(source, "int8")
    with pytest.raises(BundleError, match="weights in blocks of integers are built with --prec"):
        derive_graph(source, tmp_path / "out.onnx", capacity=CAPACITY, precision="float8")


def test_a_weight_beyond_float16_names_the_way_out(graphs: dict[str, Path], tmp_path: Path) -> None:
    model = onnx.load(graphs["llama"])
    weight = next(value for value in model.graph.initializer if len(value.dims) == 2)
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0, 0] = 1e5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    source = tmp_path / "source.onnx"
    onnx.save(model, source)
    with pytest.raises(BundleError, match="is beyond the range of float16; use bfloat16"):
        derive_graph(source, tmp_path / "out.onnx", capacity=CAPACITY, precision="float16")


def job(graph: Path, precision: str = "float16", compute_capability: str = "8.0") -> PlanJob:
    return PlanJob(
        graph=graph,
        num_attentions=NUM_LAYERS,
        updates=cache_updates(NUM_LAYERS),
        profiles=derive_profiles(max_batch=4, max_extend=16, max_gamma=4, gamma=2),
        precision=precision,
        compute_capability=compute_capability,
    )


@pytest.mark.parametrize(
    ("family", "precision", "capability"),
    [("gpt2", "float32", "8.0"), ("qwen3", "bfloat16", "8.0"), ("llama", "float8", "8.9")],
)
def test_a_family_becomes_a_plan(
    graphs: dict[str, Path], family: str, precision: str, capability: str, tmp_path: Path
) -> None:
    out = tmp_path / "model.onnx"
    derive_graph(graphs[family], out, capacity=CAPACITY, precision=precision)
    told: list[tuple[str, int, int]] = []
    asked = job(out, precision, capability)
    plan = build_plan(find_api(RTX), asked, lambda *step: told.append(step))
    assert len(plan) > 1000
    assert told
    assert all(0 <= step <= size for _, step, size in told)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_blockwise_weights_become_a_plan(
    graphs: dict[str, Path], weights: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source.onnx", tmp_path / "model.onnx"
    onnx.save(onnx.load(graphs["llama"]), source)
    quantize_file(source, weights)
    derive_graph(source, out, capacity=CAPACITY, precision="float16")
    assert len(build_plan(find_api(RTX), job(out), lambda *step: None)) > 1000


@pytest.mark.parametrize(("precision", "limit"), [("float16", 0.1), ("float32", 0.0)])
def test_8_bit_activations_become_a_plan(
    tiny_bundle: Path,
    tiny_checkpoints: tuple[Path, Path],
    precision: str,
    limit: float,
    tmp_path: Path,
) -> None:
    """In 16 bits other activations are rounded up, of logits whose deviation is 1.6."""
    source, out = tmp_path / "source" / "model.onnx", tmp_path / "out.onnx"
    shutil.copytree(tiny_bundle / "target", source.parent)
    quantize_static(source, read_model_config(AutoConfig.from_pretrained(tiny_checkpoints[0])))
    derive_graph(source, out, capacity=CAPACITY, precision=precision)
    assert len(build_plan(find_api(RTX), job(out, precision), lambda *step: None)) > 1000
    exact, found = (run_graph(path) for path in (source, out))
    assert (found["logits"] - exact["logits"]).std() <= limit


def facts_of(graph: Path) -> NetworkFacts:
    api = find_api(RTX)
    logger = make_logger(api.trt, lambda message: None)
    builder = api.trt.Builder(logger)
    network = builder.create_network(0)
    parse_graph(api, network, logger, graph)
    return read_network(api, network)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_the_demo_pair_has_a_native_cache_in_every_layer(part: str, tmp_path: Path) -> None:
    bundle = ROOT / "bundles" / "demo-float32"
    if not bundle.is_dir():
        pytest.skip(
            "scripts/demo has not run here; test_to_tensorrt exports the pair and builds it"
        )
    graph, out = bundle / part / "model.onnx", tmp_path / "model.onnx"
    derive_graph(graph, out, capacity=CAPACITY, precision="float16")
    num_layers = sum(value.name.startswith("key.") for value in onnx.load(graph).graph.input)
    facts = facts_of(out)
    assert num_layers >= 2
    assert (len(facts.attentions), len(facts.cache_updates)) == (num_layers, 2 * num_layers)
    check_network(facts, num_layers, cache_updates(num_layers))


@pytest.mark.parametrize("family", ALL)
def test_every_layer_has_one_attention_and_a_pair_of_cache_updates(
    graphs: dict[str, Path], family: str, tmp_path: Path
) -> None:
    out = tmp_path / "model.onnx"
    derive_graph(graphs[family], out, capacity=CAPACITY, precision="float16")
    facts = facts_of(out)
    assert len(facts.attentions) == NUM_LAYERS
    assert len(facts.cache_updates) == 2 * NUM_LAYERS
    for attention in facts.attentions:
        assert attention.causal_kind == "NONE"
        assert attention.mask_shape == (-1, 1, -1, CAPACITY)
        assert not attention.has_lengths
    check_network(facts, NUM_LAYERS, cache_updates(NUM_LAYERS))


def test_what_the_parser_makes_of_lengths_is_refused(
    graphs: dict[str, Path], tmp_path: Path
) -> None:
    """The canonical graph itself parses, and would answer wrongly: its lengths are dropped."""
    source = tmp_path / "static.onnx"
    model = onnx.load(graphs["llama"])
    for value in (*model.graph.input, *model.graph.output):
        if "key." in value.name or "value." in value.name:
            value.type.tensor_type.shape.dim[2].dim_value = CAPACITY
    onnx.save(model, source)
    facts = facts_of(source)
    assert {attention.causal_kind for attention in facts.attentions} == {"UPPER_LEFT"}
    assert not any(attention.has_lengths for attention in facts.attentions)
    with pytest.raises(EngineError, match="set causal_kind UPPER_LEFT"):
        build_plan(find_api(RTX), job(source), lambda *step: None)


GOOD = AttentionFacts(name="a", causal_kind="NONE", mask_shape=(-1, 1, -1, 9), has_lengths=False)
PAIRS = frozenset({("key.0", "new_key.0"), ("value.0", "new_value.0")})


@pytest.mark.parametrize(
    ("attentions", "updates", "reason"),
    [
        ((), PAIRS, "0 ATTENTION layers, the graph 1"),
        ((GOOD, GOOD), PAIRS, "2 ATTENTION layers, the graph 1"),
        ((replace(GOOD, causal_kind="LOWER_RIGHT"),), PAIRS, "a: the parser set causal_kind LOWER"),
        ((replace(GOOD, has_lengths=True),), PAIRS, "a: the parser set causal_kind NONE"),
        ((replace(GOOD, mask_shape=None),), PAIRS, "a: the parser lost the mask"),
        ((GOOD,), PAIRS - {("key.0", "new_key.0")}, "KV_CACHE_UPDATE .*: key.0, new_key.0"),
        ((GOOD,), PAIRS | {("x", "y")}, "KV_CACHE_UPDATE .*: x, y"),
    ],
)
def test_a_misunderstood_network_is_refused_by_layer(
    attentions: tuple[AttentionFacts, ...], updates: frozenset[tuple[str, str]], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        check_network(NetworkFacts(attentions=attentions, cache_updates=updates), 1, PAIRS)


class KeepingApi(TensorRtApi):
    """TensorRT-RTX as if it kept measured kernel choices; its own calls for that do nothing."""

    has_timing_cache = True


@pytest.mark.filterwarnings("ignore:.*Timing cache operations:DeprecationWarning")
def test_measured_kernel_choices_are_given_back_to_the_next_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        "double (float[batch, tokens] x) => (float[batch, tokens] y) <float two = {2.0}> { y = Mul (x, two) }"
    )
    onnx.save(model, tmp_path / "double.onnx")
    axis = Range(1, 1, 2)
    found = find_api(RTX)
    api = KeepingApi(flavour=found.flavour, version=found.version, trt=found.trt)
    assert (find_api(RTX).has_timing_cache, api.has_timing_cache) == (False, True)
    file = tmp_path / "cache" / "timing.cache"
    given: list[bytes] = []
    create = found.trt.IBuilderConfig.create_timing_cache
    monkeypatch.setattr(
        found.trt.IBuilderConfig,
        "create_timing_cache",
        lambda config, data: (given.append(bytes(data)), create(config, data))[1],
    )
    asked = PlanJob(
        graph=tmp_path / "double.onnx",
        num_attentions=0,
        profiles=(Profile(name="any", batch=axis, tokens=axis, wanted=axis),),
        precision="float32",
        compute_capability="8.0",
        timing_cache=file,
    )
    for _ in range(2):
        build_plan(api, asked, lambda *step: None)
        kept = file.read_bytes()
        assert kept
    assert given == [b"", kept]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_graph_that_the_parser_refuses_is_named_by_node(graphs: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match=r"(?s)cannot parse the graph: TensorScatter .*static"):
        build_plan(find_api(RTX), job(graphs["llama"]), lambda *step: None)
