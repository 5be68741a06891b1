"""What of TensorRT's side can be asked without a GPU: the choice of plans, and clear refusals."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cuda.bindings import runtime as cudart

from engines import cuda_device
from engines.base import EngineError
from engines.tensorrt_engine import choose_plans
from tests.engines.test_plans import PLAN

MACHINE = {"flavour": "rtx", "version": "1", "compute_capability": "8.0"}


def test_plans_that_fit_are_taken_and_the_others_are_not() -> None:
    small = replace(PLAN, capacity=128)
    others = (
        replace(PLAN, flavour="tensorrt"),
        replace(PLAN, version="2"),
        replace(PLAN, compute_capability="8.6"),
        replace(PLAN, part="draft"),
        replace(PLAN, precision="float32"),
    )
    assert choose_plans((*others, PLAN, small), "target", **MACHINE) == [PLAN, small]


def test_a_wider_precision_serves_where_no_narrow_one_was_built() -> None:
    wide = replace(PLAN, precision="float32")
    assert choose_plans((wide,), "target", **MACHINE) == [wide]


def test_without_a_fitting_plan_every_reason_is_given() -> None:
    plans = (replace(PLAN, version="2"), replace(PLAN, compute_capability="8.6"))
    with pytest.raises(EngineError) as caught:
        choose_plans(plans, "target", **MACHINE)
    text = str(caught.value)
    assert "built for version 2, this machine has 1" in text
    assert "built for compute capability 8.6, this machine has 8.0" in text
    assert "run outrider build --flavour rtx --compute-capability 8.0" in text


def test_a_bundle_without_plans_says_how_to_build_them() -> None:
    with pytest.raises(EngineError, match="of the draft fits: the bundle has none; run outrider"):
        choose_plans((PLAN,), "draft", **MACHINE)


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
