"""The graphs for trees that TensorRT is given: they answer as the bundle's own, and parse as meant."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.accelerators.device.tree_plans import keep_profile, tree_profile
from outrider.engines.accelerators.tensorrt.api import RTX, find_api
from outrider.engines.base import EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.names import past_names
from outrider.engines.bundle.plans import Profile, Range
from outrider.export.accelerators.tensorrt.network import (
    PlanJob,
    build_plan,
    cache_updates,
    check_network,
)
from outrider.export.accelerators.tensorrt.trees import derive_keep_graph, derive_tree_graph

from tests.export.accelerators.tensorrt.test_graph import facts_of

CAPACITY = 24
KINDS = {"float32": np.float32, "float16": np.float16}
TOLERANCES = {"float32": 1e-5, "float16": 5e-2}
# Of rows of four tokens: a tree, and a chain.
PARENTS = ((0, 0, 1), (0, 1, 2))


def tree_feeds(model, kind) -> dict[str, np.ndarray]:
    """A call of two rows over caches that hold noise everywhere."""
    rng = np.random.default_rng(5)
    start = np.array([7, 0])
    depths = np.array([[0, 1, 1, 2], [0, 1, 2, 3]])
    ancestors = np.zeros((2, 4, 4), dtype=np.bool_)
    for row, parents in enumerate(PARENTS):
        for node in range(4):
            ancestors[row, node, node] = True
            if node:
                ancestors[row, node] |= ancestors[row, parents[node - 1]]
    feeds = {
        "tokens": rng.integers(0, model.vocab_size, (2, 4)),
        "start": start,
        "logit_positions": np.tile(np.arange(4), (2, 1)),
        "positions": start[:, None] + depths,
        "ancestors": ancestors,
    }
    shape = (2, model.num_kv_heads, CAPACITY, model.head_size)
    for name in past_names(model.num_layers):
        feeds[name] = rng.normal(size=shape).astype(np.float32).astype(kind)
    return feeds


def run(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from outrider.engines.onnx.session import open_session

    session = open_session(path, copies_caches=True)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("precision", KINDS)
def test_a_derived_graph_answers_as_the_bundle_s_tree_graph(
    tiny_bundle: Path, precision: str, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "tree.onnx"
    derive_tree_graph(bundle.model_path(model), out, capacity=CAPACITY, precision=precision)
    expected = run(bundle.tree_path(model), tree_feeds(model, np.float32))
    found = run(out, tree_feeds(model, KINDS[precision]))
    assert found.keys() == expected.keys()
    assert found["logits"].dtype == np.float32
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCES[precision])


@pytest.mark.parametrize("precision", ["float32", "float16", "float8"])
def test_a_path_is_kept_in_the_caches_type(
    tiny_bundle: Path, precision: str, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "keep_path.onnx"
    source = bundle.keep_path_path(model)
    derive_keep_graph(source, out, capacity=CAPACITY, precision=precision)
    kind = KINDS.get(precision, np.float16)
    caches = {name: array[:1] for name, array in tree_feeds(model, kind).items() if "." in name}
    feeds = {"start": np.array([9]), "columns": np.array([11, 14]), **caches}
    for name, kept in run(out, feeds).items():
        before = caches[name.removeprefix("new_")]
        expected = before.copy()
        expected[:, :, 9:11] = before[:, :, [11, 14]]
        assert kept.dtype == kind
        np.testing.assert_array_equal(kept, expected)


def test_every_layer_has_one_masked_attention_and_a_pair_of_cache_updates(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "tree.onnx"
    derive_tree_graph(bundle.model_path(model), out, capacity=CAPACITY, precision="float16")
    facts = facts_of(out)
    assert len(facts.attentions) == model.num_layers
    for attention in facts.attentions:
        assert (attention.causal_kind, attention.has_lengths) == ("NONE", False)
        assert attention.mask_shape == (-1, 1, -1, CAPACITY)
    check_network(facts, model.num_layers, cache_updates(model.num_layers))


def test_a_kept_path_updates_every_cache_in_place_and_computes_nothing(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "keep_path.onnx"
    source = bundle.keep_path_path(model)
    derive_keep_graph(source, out, capacity=CAPACITY, precision="float16")
    facts = facts_of(out)
    assert facts.attentions == ()
    pairs = {
        (f"{k}.{n}", f"new_{k}.{n}") for k in ("key", "value") for n in range(model.num_layers)
    }
    assert facts.cache_updates == pairs
    check_network(facts, 0, frozenset(pairs))
    with pytest.raises(EngineError, match="KV_CACHE_UPDATE"):
        check_network(facts, 0, frozenset())


def test_the_host_s_tree_graph_is_not_what_is_built(tiny_bundle: Path, tmp_path: Path) -> None:
    """Its heads are grouped and its mask is numbers; the derived one has the model's own heads."""
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "tree.onnx"
    derive_tree_graph(bundle.model_path(model), out, capacity=CAPACITY, precision="float32")
    inferred = onnx.shape_inference.infer_shapes(onnx.load(out)).graph
    kinds = {value.name: value.type.tensor_type for value in inferred.value_info}
    masks = {node.input[3] for node in inferred.node if node.op_type == "Attention"}
    assert len(masks) == 1
    assert kinds[masks.pop()].elem_type == onnx.TensorProto.BOOL


def test_profiles_of_the_smallest_trees_ascend(tiny_bundle: Path) -> None:
    manifest = load_bundle(tiny_bundle).manifest
    model = replace(manifest.target, max_tree_nodes=2)
    for profile in (tree_profile(manifest, model, opt_batch=99), keep_profile(model)):
        assert isinstance(profile, Profile)
        for axis in (profile.batch, profile.tokens, profile.wanted):
            assert 1 <= axis.least <= axis.tuned <= axis.most
    assert tree_profile(manifest, model).tokens == Range(2, 2, 2)


def test_a_tree_graph_in_bfloat16_becomes_a_plan(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    model, out = bundle.manifest.target, tmp_path / "tree.onnx"
    derive_tree_graph(bundle.model_path(model), out, capacity=CAPACITY, precision="bfloat16")
    job = PlanJob(
        graph=out,
        num_attentions=model.num_layers,
        updates=cache_updates(model.num_layers),
        profiles=(tree_profile(bundle.manifest, model),),
        precision="bfloat16",
        compute_capability="8.0",
    )
    assert len(build_plan(find_api(RTX), job, lambda *step: None)) > 1000
