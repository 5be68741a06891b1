"""What a plan's own text says, of a real plan that is built without a GPU."""

from __future__ import annotations

from pathlib import Path

from outrider.engines.accelerators.tensorrt.api import RTX
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans

from scripts.gpu.first.plans import facts_of, row_of
from tests.engines.accelerators.halves import halve_bundle


def test_attention_is_fused_over_tiles_and_caches_are_updated_in_place(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    root = tmp_path / "bundle"
    halve_bundle(tiny_bundle, root, with_trees=False, max_batch=3)
    options = BuildOptions(flavour=RTX, compute_capabilities=("8.9",), parts=("target",))
    built = build_plans(root, options, report=lambda *step: None)
    (plan,) = built.manifest.plans
    figures = row_of(load_bundle(root), plan).figures
    layers = built.manifest.target.num_layers
    assert figures["attention given"] == figures["attention fused"] == layers
    assert figures["kernel"] == "gemm_mha_v2"
    assert figures["caches in place"] == 2 * layers
    assert figures["tiles listed"] == 2
    assert facts_of(b"no plan at all") == {
        "attention given": 0,
        "attention fused": 0,
        "kernel": "",
        "caches in place": 0,
        "tiles listed": 0,
    }
