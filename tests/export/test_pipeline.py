import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from outrider import LLM, SamplingParams
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.names import DEVICE_FILE, LOGITS
from outrider.export.accelerators import device_graphs
from outrider.export.accelerators.device_graphs import derive_device_graphs
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.factory import load_model
from outrider.runtime.serving.settings import ServeOptions
from outrider.runtime.verify.command import verify

PLAIN = ServerConfig(default_gamma=1)


def test_bundle_describes_what_was_exported(tiny_bundle: Path) -> None:
    manifest = load_bundle(tiny_bundle).manifest
    assert manifest.target.num_layers == 2
    assert (manifest.target.num_kv_heads, manifest.target.head_size) == (2, 16)
    assert manifest.draft is not None
    assert (manifest.draft.num_layers, manifest.draft.head_size) == (1, 8)
    assert (manifest.eos_token_ids, manifest.bos_token_id) == ((1,), 0)
    assert sorted(manifest.files) == [
        "draft/device.onnx",
        "draft/device_keep_path.onnx",
        "draft/device_tree.onnx",
        "draft/grouped.onnx",
        "draft/keep_path.onnx",
        "draft/model.onnx",
        "draft/model.onnx.data",
        "draft/tree.onnx",
        "target/device.onnx",
        "target/device_keep_path.onnx",
        "target/device_tree.onnx",
        "target/grouped.onnx",
        "target/keep_path.onnx",
        "target/model.onnx",
        "target/model.onnx.data",
        "target/tree.onnx",
        "tokenizer.json",
    ]
    assert set(manifest.certificate) == {"target", "draft"}
    assert (manifest.target.max_tree_nodes, manifest.draft.max_tree_nodes) == (64, 64)
    certificate = manifest.certificate["target"]
    assert certificate["tree_masks"]["max_difference"] <= 1e-4
    assert certificate["grouped"]["rollback"]["max_difference"] <= 1e-4
    assert certificate["device"]["rollback"]["max_difference"] <= 1e-4
    assert certificate["device"]["tree_paths"]["max_difference"] <= 1e-4
    assert (manifest.target.device_precision, manifest.draft.device_precision) == ("float32",) * 2


def test_a_bundle_without_trees_says_so(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    manifest = export_small(weights="int8", max_tree_nodes=0).manifest
    assert manifest.target.max_tree_nodes == 0
    assert not [name for name in manifest.files if "tree" in name or "path" in name]
    with pytest.raises(BundleError, match="max_tree_nodes"):
        export_small(out=tmp_path / "other", max_tree_nodes=1, progress=pytest.fail)


def test_a_draft_of_several_tokens_a_call_is_known_by_its_configuration_and_served(
    export_small: Callable[..., Bundle], tiny_checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """PARD's checkpoints name the token that stands for those to come."""
    draft = tmp_path / "draft"
    shutil.copytree(tiny_checkpoints[1], draft)
    config = json.loads((draft / "config.json").read_text("utf-8"))
    (draft / "config.json").write_text(json.dumps({**config, "pard_token": 7}), "utf-8")
    bundle = export_small(draft=draft, max_tree_nodes=0)
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.parallel_token == 7
    assert bundle.manifest.target.parallel_token is None
    assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest
    prompts = ["the quick brown", "def add", "once upon"]
    asked = {"max_tokens": 12, "temperature": 0.0}
    with LLM(bundle.root, gamma=3) as llm:
        drafted = llm.generate(prompts, SamplingParams(**asked))
        plain = llm.generate(prompts, SamplingParams(**asked, speculation={"enabled": False}))
    for one, other in zip(drafted, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].speculation.drafted_by_position[2] > 0


def test_graph_carries_no_path_of_the_machine(tiny_bundle: Path) -> None:
    graph = (tiny_bundle / "target" / "model.onnx").read_bytes()
    assert b".py" not in graph


def test_export_that_dies_leaves_nothing_behind(
    export_small: Callable[..., Bundle], tmp_path: Path
) -> None:
    def die_at_parity(stage: str) -> None:
        if stage.startswith("target: comparing"):
            assert list(tmp_path.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_small(progress=die_at_parity)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_never_overwritten(
    export_small: Callable[..., Bundle], tiny_bundle: Path
) -> None:
    with pytest.raises(BundleError, match="exists already"):
        export_small(out=tiny_bundle, progress=pytest.fail)


def test_a_disk_without_three_times_the_weights_is_refused_before_any_work(
    export_small: Callable[..., Bundle],
    tiny_checkpoints: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Float32 weights of a checkpoint in 16 bits, and 16 bits again beside them."""
    num_bytes = sum(file.stat().st_size for file in tiny_checkpoints[1].glob("*.safetensors"))
    free = 3 * num_bytes + (64 << 20) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(BundleError, match="MiB of disk are wanted for the export"):
        export_small(progress=pytest.fail)


def test_where_a_graph_in_halves_strays_accelerators_compute_in_float32(
    export_small: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def derive_and_spoil(path: Path, precision: str, *, with_trees: bool) -> None:
        derive_device_graphs(path, precision, with_trees=with_trees)
        if precision == "float32":
            return
        half = path.with_name(DEVICE_FILE)
        model = onnx.load(half, load_external_data=False)
        last = next(node for node in model.graph.node if LOGITS in node.output)
        last.output[:] = [f"{LOGITS}.exact"]
        doubled = [f"{LOGITS}.exact", f"{LOGITS}.exact"]
        model.graph.node.append(onnx.helper.make_node("Add", doubled, [LOGITS]))
        onnx.save(model, half)

    stages: list[str] = []
    whole = export_small(weights="float16", progress=stages.append)
    assert whole.manifest.target.device_precision == "float16"
    assert not [stage for stage in stages if "float32" in stage]
    monkeypatch.setattr(device_graphs, "derive_device_graphs", derive_and_spoil)
    spoilt = export_small(
        out=whole.root.with_name("spoilt"), weights="float16", progress=stages.append
    )
    assert spoilt.manifest.target.device_precision == "float32"
    device = spoilt.manifest.certificate["target"]["float16"]["device"]
    assert 0 < device["rollback"]["max_difference"] < device["tolerance"]
    assert sum("accelerators compute in float32" in stage for stage in stages) == 1


def test_an_export_prints_nothing_of_the_libraries(
    export_small: Callable[..., Bundle], capfd: pytest.CaptureFixture[str]
) -> None:
    export_small(max_tree_nodes=0)
    assert capfd.readouterr() == ("", "")


def test_what_is_accepted_is_recorded_and_told(
    tiny_bundle: Path, export_small: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    """Of each part, by the manifest, verify-sampler and the server's start; a plain export says nothing of it."""
    assert load_bundle(tiny_bundle).manifest.accepted_words() == ""
    bundle = export_small(accept_parity=0.5, max_tree_nodes=0)
    words = "target: its logits may differ by 0.5 from its checkpoint's, beyond its own rounding"
    assert bundle.manifest.accepted_parity("target") == 0.5
    assert bundle.manifest.certificate["target"]["tolerance"] == 0.5
    report = verify(bundle.root, num_samples=200, false_alarm=1e-6, seed=0)
    assert words in report.table()
    with caplog.at_level("WARNING"):
        load_model(bundle.root, ServeOptions(device="cpu", config=PLAIN)).close()
    assert words in caplog.text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_nothing_is_accepted_that_is_no_difference(
    export_small: Callable[..., Bundle], value: float
) -> None:
    with pytest.raises(BundleError, match="accept_parity must be a number above 0"):
        export_small(accept_parity=value, progress=pytest.fail)


@pytest.mark.parametrize("asked", [1, 10_000])
def test_a_context_beyond_the_bundles_is_refused_by_name(tiny_bundle: Path, asked: int) -> None:
    most = load_bundle(tiny_bundle).manifest.max_context
    with pytest.raises(ConfigError, match=rf"max_context: must be in \[2, {most}\], the bundle's"):
        load_model(tiny_bundle, ServeOptions(device="cpu", config=PLAIN, max_context=asked))
