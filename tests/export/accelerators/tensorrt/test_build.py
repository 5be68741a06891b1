"""Plans inside a bundle: declared with their hashes, loadable whatever happens to a build."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.accelerators.backends import TensorRtBackend
from outrider.engines.accelerators.device.cuda import compute_capability
from outrider.engines.accelerators.device.sources import choose_read_plan
from outrider.engines.accelerators.tensorrt.api import RTX, find_api
from outrider.engines.accelerators.tensorrt.engine import choose_engine_plans, choose_plan
from outrider.engines.accelerators.tensorrt.kernel_cache import KernelCache, kernel_file
from outrider.engines.accelerators.tensorrt.program import TensorRtProgram
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.files import fingerprint
from outrider.engines.bundle.manifest import Manifest, write_manifest
from outrider.engines.bundle.plans import Machine
from outrider.export.accelerators.tensorrt.build import BuildOptions, build_plans
from outrider.export.accelerators.tensorrt.parts import MODELS, TREES, plan_parts
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.runtime.cli.main import app
from outrider.runtime.cli.refusals import EXIT_REFUSED
from typer.testing import CliRunner

ROOT = Path(__file__).parents[4]
VERSION = find_api(RTX).version


def build(root: Path, **options: object) -> Manifest:
    given = {"flavour": RTX, "compute_capabilities": ("8.0",), "parts": MODELS} | options
    return build_plans(root, BuildOptions(**given), report=lambda *step: None).manifest


@pytest.fixture(scope="module")
def built(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with float16 plans, made by the command line."""
    root = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_bundle, root)
    arguments = [str(root), "--flavour", RTX, "--compute-capability", "8.0"]
    result = CliRunner().invoke(app, ["build", *arguments, "--gamma", "3", "--opt-batch", "2"])
    assert result.exit_code == 0, result.output
    assert f"plans/rtx-{VERSION}-sm80/target-float16-768-" in result.output
    return root


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def test_a_plan_is_read_only_by_the_hash_of_the_manifest(copy: Path) -> None:
    """Also where it changes after the bundle was loaded."""
    bundle = load_bundle(copy)
    plan = bundle.manifest.plans[0]
    files = {name: entry for name, entry in bundle.manifest.files.items() if name != plan.path}
    unlisted = replace(bundle, manifest=replace(bundle.manifest, files=files))
    with pytest.raises(BundleError, match="not listed in"):
        unlisted.read(plan.path)
    with (copy / plan.path).open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        BundleError,
        match="bytes, manifest",
    ):
        bundle.read(plan.path)


def has_no_gpu() -> bool:
    try:
        compute_capability(0)
    except EngineError:
        return True
    return False


def test_plans_are_declared_with_hash_profiles_and_machine(built: Path) -> None:
    manifest = load_bundle(built).manifest
    assert sorted(plan.part for plan in manifest.plans) == ["draft", "target"]
    for plan in manifest.plans:
        assert manifest.files[plan.path] == fingerprint(built / plan.path)
        assert manifest.files[plan.path].sha256[:12] in plan.path
        assert (plan.flavour, plan.version, plan.compute_capability) == (RTX, VERSION, "8.0")
        assert plan.capacity == manifest.max_context + manifest.max_extend
        step, verify, prefill = plan.profiles
        assert (step.tokens, step.batch) == ((1, 1, 2), (1, 2, manifest.max_batch))
        assert verify.tokens == (2, 3 + 1, manifest.max_gamma + 1)
        assert prefill.tokens.most == manifest.max_extend


def test_a_bundle_with_plans_is_served_as_before(built: Path) -> None:
    from outrider.engines.base import Span
    from outrider.engines.opening import open_engine

    engine = open_engine(load_bundle(built), "target")
    logits = engine.extend([Span(slot=0, start=0, tokens=(1, 2), num_logits=2)])
    assert logits.shape[:2] == (1, 2)


def test_an_equal_build_replaces_the_plan_and_another_stays(copy: Path) -> None:
    old = load_bundle(copy).manifest
    others = [plan for plan in old.plans if plan.part != "target"]
    target = next(plan for plan in old.plans if plan.part == "target")
    other = replace(target, path=f"{target.path}.sm86", compute_capability="8.6")
    shutil.copyfile(copy / target.path, copy / other.path)
    files = dict(old.files) | {other.path: fingerprint(copy / other.path)}
    write_manifest(copy, replace(old, files=files, plans=(*old.plans, other)))
    new = build(copy, opt_batch=1, parts=("target",))
    assert other in new.plans
    assert [plan for plan in new.plans if plan.part != "target"] == others
    again = next(
        plan for plan in new.plans if plan.part == "target" and plan.compute_capability == "8.0"
    )
    assert again.profiles[0].batch.tuned == 1
    assert (copy / again.path).is_file()
    assert again.path == target.path or not (copy / target.path).exists()


def test_trees_have_plans_of_their_own_where_they_are_asked_for(copy: Path) -> None:
    others = load_bundle(copy).manifest.plans
    manifest = build(copy, parts=(TREES,), opt_batch=2)
    plans = {plan.part: plan for plan in manifest.plans if plan not in others}
    files = [f"{part}/{name}.onnx" for part in MODELS for name in ("tree", "keep_path")]
    assert plans.keys() == {*files}
    for part in MODELS:
        tree, keep = plans[f"{part}/tree.onnx"], plans[f"{part}/keep_path.onnx"]
        chain = next(plan for plan in others if plan.part == part)
        assert tree.capacity == keep.capacity == chain.capacity
        assert tree.precision == keep.precision == chain.precision
        most = getattr(manifest, part).max_tree_nodes
        assert tree.profiles[0].tokens == (2, 16, most)
        assert tree.profiles[0].batch == (1, 2, manifest.max_batch)
        assert keep.profiles[0].tokens == (1, 4, most - 1)
        # The weights once more; a path's plan has none.
        assert manifest.files[tree.path].size > 2 * manifest.files[keep.path].size
        machine = Machine(RTX, VERSION, "8.0")
        chosen = choose_engine_plans(manifest, part, machine, with_trees=True)
        assert chosen == (chain, (tree, keep))


def test_a_bundle_without_trees_is_given_no_plans_for_them(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    manifest = bundle.manifest
    models = [replace(model, max_tree_nodes=0) for model in (manifest.target, manifest.draft)]
    without = replace(bundle, manifest=replace(manifest, target=models[0], draft=models[1]))
    with pytest.raises(BundleError, match="part 'trees': no model of the bundle takes trees"):
        plan_parts(without, (TREES,))


def test_what_a_killed_build_leaves_is_never_read(copy: Path) -> None:
    expected = load_bundle(copy).manifest
    (copy / "plans" / "target-unfinished.plan").write_bytes(b"half")
    assert load_bundle(copy).manifest == expected


def test_a_changed_plan_is_refused(copy: Path) -> None:
    plan = load_bundle(copy).manifest.plans[0]
    data = bytearray((copy / plan.path).read_bytes())
    data[100] ^= 1
    (copy / plan.path).write_bytes(data)
    with pytest.raises(
        BundleError,
        match="differs from its sha256",
    ):
        load_bundle(copy).read(plan.path)


def test_a_plan_without_a_hash_is_refused(copy: Path) -> None:
    manifest = load_bundle(copy).manifest
    plan = manifest.plans[0]
    files = {name: entry for name, entry in manifest.files.items() if name != plan.path}
    write_manifest(copy, replace(manifest, files=files))
    with pytest.raises(BundleError, match="a plan without a hash"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        (
            {"precision": "float64"},
            BundleError,
            "must be one of float32, float16, bfloat16, float8",
        ),
        ({"flavour": "cudnn"}, EngineError, "must be one of tensorrt, rtx"),
        ({"compute_capabilities": ("9.9",)}, EngineError, r"builds for 7\.5, 8\.0"),
        (
            {"compute_capabilities": ("8.0", "9.0")},
            EngineError,
            r"9\.0: .* builds for .*; --flavour tensorrt builds for the GPU it runs on",
        ),
        (
            {"compute_capabilities": ("abc",), "precision": "float8"},
            EngineError,
            r"compute capability abc: .* builds for 7\.5",
        ),
        (
            {"precision": "int4"},
            BundleError,
            "'int4': weights of integers are the bundle's own; export with --weights int4",
        ),
        (
            {"precision": "float8"},
            EngineError,
            r"8\.0: float8 needs 8\.9 or later; build with --precision float16",
        ),
        ({"parts": ("head",)}, BundleError, "must be one of target, draft, trees"),
    ],
)
def test_an_impossible_build_is_refused_and_changes_nothing(
    copy: Path, options: dict[str, object], error: type[Exception], reason: str
) -> None:
    before = sorted(copy.rglob("*"))
    with pytest.raises(error, match=reason):
        build(copy, **options)
    assert sorted(copy.rglob("*")) == before
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


@pytest.mark.skipif(not has_no_gpu(), reason="a GPU is here, so the plan would be loaded")
def test_a_plan_that_the_driver_refuses_is_refused_in_the_librarys_words(built: Path) -> None:
    bundle, api = load_bundle(built), find_api(RTX)
    plan = choose_plan(bundle.manifest.plans, "draft", Machine(RTX, VERSION, "8.0"))
    # Without a GPU nothing gets as far as the device.
    name = re.escape(Path(plan.path).name)
    with pytest.raises(EngineError, match=rf"{name}: does not run here: .*driver"):
        api.check_valid(bundle.root / plan.path)
    kernels = KernelCache(kernel_file(bundle.root, Machine(RTX, VERSION, "8.0")))
    with pytest.raises(EngineError, match=rf"{re.escape(plan.path)}: cannot be loaded: .*CUDA"):
        TensorRtProgram(api, None, bundle, plan, kernels)


@pytest.mark.skipif(not has_no_gpu(), reason="a GPU is here, so the build would succeed")
def test_without_a_gpu_the_way_out_is_named(built: Path) -> None:
    result = CliRunner().invoke(app, ["build", str(built), "--flavour", RTX])
    assert result.exit_code == EXIT_REFUSED
    assert "name --compute-capability to build ahead of time" in result.output


@pytest.mark.skipif(not has_no_gpu(), reason="a GPU is here, so the sampler would run on it")
def test_where_the_sampler_cannot_run_the_reason_is_given(built: Path) -> None:
    assert "CUDA: " in TensorRtBackend().why_no_sampler(load_bundle(built), 0)


@pytest.mark.long
def test_the_demo_pair_becomes_plans(tmp_path: Path) -> None:
    root, exported = tmp_path / "demo", ROOT / "bundles" / "demo-float32"
    if exported.is_dir():  # what scripts/demo made of the same checkpoints
        shutil.copytree(exported, root)
    else:
        target, draft = ROOT / "demo" / "target", ROOT / "demo" / "draft"
        export_bundle(
            target=target,
            draft=draft,
            out=root,
            options=ExportOptions(max_context=1024),
            progress=lambda stage: None,
        )
    manifest = build(root)
    sizes = {plan.part: manifest.files[plan.path].size for plan in manifest.plans}
    assert sizes.keys() == {"target", "draft"}
    # Half of what the float32 graph weighs, and some kernels.
    weights = manifest.files["target/model.onnx.data"].size
    assert weights / 2 < sizes["target"] < weights


@pytest.mark.long
def test_a_model_with_an_encoder_has_a_plan_that_reads_sources(
    tiny_text2text_bundle: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(tiny_text2text_bundle, tmp_path / "bundle"))
    manifest = build(root)
    plans = {plan.part: plan for plan in manifest.plans}
    assert plans.keys() == {*MODELS, *(f"{part}/encode.onnx" for part in MODELS)}
    reads = plans["target/encode.onnx"]
    assert (reads.capacity, reads.precision) == (128, "float16")
    (profile,) = reads.profiles
    assert (profile.batch, profile.tokens) == ((1, 8, 8), (2, 64, 96))
    machine = Machine(RTX, VERSION, "8.0")
    found = choose_read_plan(manifest.plans, "target", precision="float16", machine=machine)
    assert found == reads
    for other in ({"precision": "float32"}, {"machine": machine._replace(version="1")}):
        with pytest.raises(EngineError, match=r"no TensorRT plan of target/encode\.onnx in float"):
            choose_read_plan(
                manifest.plans, "target", **{"precision": "float16", "machine": machine} | other
            )
