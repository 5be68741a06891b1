"""What a plan's own text says, of a real plan that is built without a GPU."""

from __future__ import annotations

from pathlib import Path

from outrider.engines.accelerators.tensorrt.api import RTX
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans

from scripts.gpu.first.plans import fused_layers, row_of
from tests.engines.accelerators.halves import halve_bundle


def test_attention_of_every_layer_is_one_fused_kernel(tiny_bundle: Path, tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    halve_bundle(tiny_bundle, root, with_trees=False, max_batch=3)
    options = BuildOptions(flavour=RTX, compute_capabilities=("8.9",), parts=("target",))
    built = build_plans(root, options, report=lambda *step: None)
    (plan,) = built.manifest.plans
    figures = row_of(load_bundle(root), plan).figures
    assert figures["fused attention layers"] == built.manifest.target.num_layers
    assert fused_layers(b"no plan at all") == []
