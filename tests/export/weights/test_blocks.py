from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.export.pipeline import ExportOptions, export_bundle


def test_quantised_bundle_stores_integers_and_says_what_they_cost(
    tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = tiny_checkpoints
    stages: list[str] = []
    bundle = export_bundle(
        target=target,
        draft=draft,
        out=tmp_path / "bundle",
        options=ExportOptions(weights="int8", draft_weights="int4", max_context=64),
        progress=stages.append,
    )
    assert bundle.manifest == load_bundle(tmp_path / "bundle").manifest
    for part, kind in (("target", "int8"), ("draft", "int4")):
        graph = onnx.load(tmp_path / "bundle" / part / "model.onnx").graph
        expected = onnx.TensorProto.INT8 if kind == "int8" else onnx.TensorProto.INT4
        stored = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        types = {tensor.data_type for tensor in graph.initializer if tensor.name in stored}
        assert types == {expected}
        weights = {tensor.name for tensor in graph.initializer}
        assert not [n for n in graph.node if n.op_type == "MatMul" and n.input[1] in weights]
        certificate = bundle.manifest.certificate[part]
        assert isinstance(certificate, dict)
        assert certificate["prefill"]["max_difference"] < 1e-4
        assert 1e-4 < certificate[kind]["prefill"]["max_difference"] < 10
    assert any("int4" in stage for stage in stages)


def test_unknown_weights_are_refused_before_any_work(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match="int3"):
        export_small(weights="int3", progress=pytest.fail)
    assert not list(tmp_path.iterdir())
