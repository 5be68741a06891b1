"""What of TensorRT's side can be asked without a GPU: the choice of plans, and clear refusals."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cuda.bindings import runtime as cudart
from outrider.engines.accelerators.device import cuda as cuda_device
from outrider.engines.accelerators.tensorrt.api import TensorRtApi
from outrider.engines.accelerators.tensorrt.engine import (
    choose_engine_plans,
    choose_plan,
    serving_api,
)
from outrider.engines.base import EngineError
from outrider.engines.bundle.manifest import Manifest, ModelEntry
from outrider.engines.bundle.plans import Machine, PlanEntry

from tests.engines.bundle.test_plans import PLAN

MACHINE = Machine("rtx", "1", "8.0")


def test_of_plans_that_fit_the_one_of_the_largest_cache_is_taken() -> None:
    """Older bundles have plans of smaller caches too, each with its own weights."""
    small = replace(PLAN, capacity=128)
    others = (
        replace(PLAN, flavour="tensorrt"),
        replace(PLAN, version="2"),
        replace(PLAN, compute_capability="8.6"),
        replace(PLAN, part="draft"),
        replace(PLAN, precision="float32"),
    )
    assert choose_plan((*others, small, PLAN), "target", MACHINE) == PLAN


def test_a_wider_precision_serves_where_no_narrow_one_was_built() -> None:
    wide = replace(PLAN, precision="float32")
    assert choose_plan((wide,), "target", MACHINE) == wide


def test_without_a_fitting_plan_every_reason_is_given() -> None:
    plans = (replace(PLAN, version="2"), replace(PLAN, compute_capability="8.6"))
    with pytest.raises(EngineError) as caught:
        choose_plan(plans, "target", MACHINE)
    text = str(caught.value)
    assert "built for version 2, this machine has 1" in text
    assert "built for compute capability 8.6, this machine has 8.0" in text
    assert "run outrider build --flavour rtx --compute-capability 8.0" in text


APIS = [TensorRtApi(flavour=name, version="1", trt=None) for name in ("tensorrt", "rtx")]


def manifest_with(*plans: PlanEntry) -> Manifest:
    return Manifest(
        target=ModelEntry(
            path="target",
            num_layers=1,
            num_kv_heads=1,
            head_size=8,
            vocab_size=8,
            weights="float32",
        ),
        draft=None,
        max_context=8,
        max_batch=1,
        max_gamma=1,
        max_extend=8,
        eos_token_ids=(),
        bos_token_id=None,
        plans=plans,
    )


def test_of_two_flavours_the_one_with_plans_serves() -> None:
    rtx, data_centre = PLAN, replace(PLAN, flavour="tensorrt")
    assert serving_api(APIS, manifest_with(rtx), "8.0").flavour == "rtx"
    assert serving_api(APIS, manifest_with(rtx, data_centre), "8.0").flavour == "tensorrt"
    with pytest.raises(EngineError) as caught:
        serving_api(APIS, manifest_with(rtx), "9.0")
    assert "built for flavour rtx, this machine has tensorrt" in str(caught.value)
    assert "built for compute capability 8.0, this machine has 9.0" in str(caught.value)


def test_a_bundle_without_plans_says_how_to_build_them() -> None:
    with pytest.raises(EngineError, match="of the draft fits: the bundle has none; run outrider"):
        choose_plan((PLAN,), "draft", MACHINE)


def for_trees(plan: PlanEntry) -> list[PlanEntry]:
    return [replace(plan, part=f"{plan.part}/{name}.onnx") for name in ("tree", "keep_path")]


def test_plans_for_trees_are_taken_with_those_for_chains() -> None:
    verify, keep = for_trees(PLAN)
    manifest = manifest_with(PLAN, verify, keep)
    chosen = choose_engine_plans(manifest, "target", MACHINE, with_trees=True)
    assert chosen == (PLAN, (verify, keep))
    chosen = choose_engine_plans(manifest, "target", MACHINE, with_trees=False)
    assert chosen == (PLAN, None)


def test_trees_are_taken_in_the_cache_of_chains_alone() -> None:
    small = replace(PLAN, capacity=128)
    only_small = manifest_with(small, PLAN, *for_trees(small))
    assert choose_engine_plans(only_small, "target", MACHINE, with_trees=True) == (PLAN, None)


@pytest.mark.parametrize(
    "change", [{"precision": "float32"}, {"version": "2"}, {"compute_capability": "8.6"}]
)
def test_plans_for_trees_that_do_not_match_leave_chains(change: dict[str, str]) -> None:
    manifest = manifest_with(PLAN, *(replace(plan, **change) for plan in for_trees(PLAN)))
    chosen = choose_engine_plans(manifest, "target", MACHINE, with_trees=True)
    assert chosen == (PLAN, None)


def test_every_name_of_the_cuda_runtime_exists() -> None:
    tree = ast.parse(Path(cuda_device.__file__).read_text(encoding="utf-8"))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cudart"
    }
    assert len(names) > 15
    assert {name for name in names if not hasattr(cudart, name)} == set()


def test_a_failed_call_is_told_in_cudas_words() -> None:
    with pytest.raises(EngineError, match="CUDA: out of memory"):
        cuda_device.check((cudart.cudaError_t.cudaErrorMemoryAllocation, None))
    assert cuda_device.check((cudart.cudaError_t.cudaSuccess, 7)) == 7
