"""Every graph that CUDA would run, on ONNX Runtime's real CUDA provider over stub libraries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from scripts.gpu.placement import _SHAPES
from tests.scripts.gpu.stored import store_bundle

# Bundles: storage of weights, and what accelerators compute in.
WEIGHTS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "float16"),
    "int4": ("int4", "float16"),
    "int8-bfloat16": ("int8", "bfloat16"),
    "int4-bfloat16": ("int4", "bfloat16"),
}
# The same of a pair with encoders.
SOURCES = {"text2text": ("float32", "float32"), "text2text-float16": ("float32", "float16")}
MUTANT = "mutant"
MODEL_GRAPHS = ("device.onnx", "device_tree.onnx", "device_keep_path.onnx")
# All of it computes shapes: nothing of it reads what is on the device, or a node would copy it.
ON_HOST = {
    "device.onnx": ["Squeeze"],
    "text2text/device.onnx": ["Squeeze", "Squeeze"],
    "text2text/device_encode.onnx": ["Squeeze", "Squeeze"],
    "device_tree.onnx": ["Concat", "Squeeze"],
    "device_keep_path.onnx": [],
}
# Kernels, products and copies of a layer at most, in float32 and in 16 bits.
LAYER_SUBMISSIONS = {"device.onnx": (23, 17), "device_tree.onnx": (23, 20)}
# Matrices of a layer: those in blocks are widened first where a call has many rows.
LAYER_MATRICES = 4

Found = dict[str, dict[str, Any]]


def draw_start_to_the_host(path: Path) -> None:
    """Let a graph compute lengths as ``start`` plus the span's width again."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    for node in graph.node:
        node.input[:] = ["summed" if name == "lengths" else name for name in node.input]
    nodes = [
        helper.make_node("Shape", ["tokens"], ["width"], start=1, end=2),
        helper.make_node("Squeeze", ["width", "first_axis"], ["one_width"]),
        helper.make_node("Add", ["start", "one_width"], ["summed"]),
    ]
    for place_in_order, node in enumerate(nodes):
        graph.node.insert(place_in_order, node)
    graph.initializer.append(helper.make_tensor("first_axis", TensorProto.INT64, [1], [0]))
    onnx.save(model, path)


@pytest.fixture(scope="module")
def found(
    run_on_stubs: Callable[..., subprocess.CompletedProcess[str]],
    tiny_bundle: Path,
    tiny_checkpoints: tuple[Path, Path],
    tiny_text2text_bundle: Path,
    tiny_text2text_checkpoints: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """Everything found of every graph, by "bundle/model/file"; one of the bundles is a mutant."""
    root = tmp_path_factory.mktemp("placed")
    for name, kinds in WEIGHTS.items():
        store_bundle(tiny_bundle, root / name, tiny_checkpoints, *kinds)
    for name, kinds in SOURCES.items():
        store_bundle(tiny_text2text_bundle, root / name, tiny_text2text_checkpoints, *kinds)
    store_bundle(
        tiny_bundle, root / MUTANT, tiny_checkpoints, "float16", "float16",
        change=draw_start_to_the_host,
    )  # fmt: skip
    bundles = [str(root / name) for name in (*WEIGHTS, *SOURCES, MUTANT)]
    out = root / "found.json"
    done = run_on_stubs("-m", "scripts.gpu.placement", *bundles, "--json", str(out))
    assert done.stdout.startswith("| graph |")
    whole = [line for line in done.stdout.splitlines() if "a round of gamma 4" in line]
    assert len(whole) == len(WEIGHTS) + 1
    # The mutant is refused when it is opened.
    assert [MUTANT in line for line in whole] == ["cannot" in line for line in whole]
    assert all(
        " 0 of them from the host, 0 allocations, 1 replay" in line
        for line in whole
        if MUTANT not in line
    )
    return {one["graph"]: one for one in json.loads(out.read_text())}


@pytest.fixture(scope="module")
def placed(found: Found) -> Found:
    return {graph: one for graph, one in found.items() if not graph.startswith(MUTANT)}


def test_every_graph_is_opened(placed: Found) -> None:
    models = {
        f"{weights}/{part}/{file}"
        for weights in WEIGHTS
        for part in ("target", "draft")
        for file in MODEL_GRAPHS
    }
    models |= {
        f"{name}/{part}/{file}"
        for name in SOURCES
        for part in ("target", "draft")
        for file in (*MODEL_GRAPHS, "device_encode.onnx")
    }
    assert set(placed) == models
    assert [one["refused"] + one["failure"] for one in placed.values()] == [""] * len(placed)


def test_no_tensor_crosses_to_the_host(placed: Found) -> None:
    for graph, one in placed.items():
        assert (one["num_memcpys"], one["host_inputs"], one["host_outputs"]) == (0, [], []), graph
        assert [run["num_waits"] for run in one["runs"]] == [0] * len(one["runs"]), graph


def test_only_arithmetic_of_shapes_is_on_the_host(placed: Found) -> None:
    for graph, one in placed.items():
        operators = sorted(node.split()[0] for node in one["on_host"])
        bundle, _, file = graph.split("/")
        of_sources = f"text2text/{file}" if bundle in SOURCES else file
        assert operators == ON_HOST.get(of_sources, ON_HOST.get(file)), graph
        assert one["on_device"] > 0


def test_every_graph_is_recorded_and_replayed(placed: Found) -> None:
    for graph, one in placed.items():
        assert one["records"], (graph, one["why_not_recorded"])


def test_16_bits_attend_by_one_fused_kernel_whatever_the_span(placed: Found) -> None:
    kinds = {"float32": ("unfused", "unfused")}
    for weights, (_, precision) in WEIGHTS.items():
        wanted = kinds.get(precision, ("Flash", "memory-efficient"))
        for file, kind in zip(LAYER_SUBMISSIONS, wanted, strict=True):
            runs = placed[f"{weights}/target/{file}"]["runs"]
            assert [run["attention"] for run in runs] == [kind] * len(_SHAPES), (weights, file)


def test_a_source_is_attended_to_without_a_mask(placed: Found) -> None:
    """A text's own biases are a mask to the library; within a source they are too."""
    kinds = {
        "text2text": ("memory-efficient",) * 2,
        "text2text-float16": ("Flash", "memory-efficient"),
    }
    for name, wanted in kinds.items():
        for file, kind in zip(("device.onnx", "device_encode.onnx"), wanted, strict=True):
            runs = placed[f"{name}/target/{file}"]["runs"]
            assert [run["attention"] for run in runs] == [kind] * len(_SHAPES), (name, file)
            assert [run["num_uploads"] for run in runs] == [0] * len(_SHAPES), (name, file)


def test_a_layer_keeps_its_number_of_launches(placed: Found) -> None:
    """The target has one layer more than the draft, and the same besides."""
    for weights, (storage, precision) in WEIGHTS.items():
        for file, bounds in LAYER_SUBMISSIONS.items():
            bound = bounds[precision != "float32"]
            bound += LAYER_MATRICES if storage.startswith("int") else 0
            # The target's last layer keeps 8 bits, and the draft's only one does not.
            bound += storage == "int4"
            both = (placed[f"{weights}/{part}/{file}"]["runs"] for part in ("target", "draft"))
            for target, draft in zip(*both, strict=True):
                assert 0 < target["num_submissions"] - draft["num_submissions"] <= bound, weights
                assert target["num_uploads"] == 0, weights


def test_a_graph_that_draws_an_input_to_the_host_is_caught(found: Found) -> None:
    one = found[f"{MUTANT}/target/device.onnx"]
    # What no node reads is the host's too.
    assert one["host_inputs"] == ["start", "lengths"]
    assert one["num_memcpys"] == 2
    assert one["refused"] == (
        "target/device.onnx: the CUDA provider reads 'start', 'lengths' on the host "
        "and would keep the first value; export the bundle again"
    )
