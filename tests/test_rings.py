"""The core stands alone: a copy without add-ons imports, exports, serves and answers, and passes its own tests."""

from __future__ import annotations

import ast
import faulthandler
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from outrider import SyncClient
from outrider.engines.bundle.bundle import load_bundle
from outrider.runtime.cli.refusals import EXIT_REFUSED

from scripts.lab.soak.server import outrider, running_server
from tests.test_architecture import ADDONS, is_under

ROOT = Path(__file__).parents[1]
# An add-on's own beside its code and the tests that mirror it.
OWN_FOLDERS = {"accelerators": ["tests/emulation"]}
# The checkout is installed as links, too: what is not in the copy must not be found there.
SITE = """
import sys

sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
"""
IMPORTS = """
import importlib, pkgutil, sys
from pathlib import Path

import outrider

assert Path(outrider.__file__).parents[1] == Path(sys.argv[1]), outrider.__file__
for found in pkgutil.walk_packages(outrider.__path__, "outrider."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
SMALL = ("--max-context", "64", "--max-batch", "2", "--max-gamma", "2", "--max-tree-nodes", "0")


def folders_of(addon: str) -> list[str]:
    """Folders of an add-on's code in the checkout."""
    return [one.replace(".", "/") for one in ADDONS[addon].split()]


def copied(folder: Path, addons: Iterable[str]) -> Path:
    """Return a copy of the code in the layout that is installed, without some add-ons."""
    own = [
        *(ROOT / "proto" / "outrider").iterdir(),
        *(ROOT / n for n in ("engines", "runtime", "export")),
    ]
    (folder / "outrider").mkdir()
    for part in own:
        copy = shutil.copytree if part.is_dir() else shutil.copy
        copy(part, folder / "outrider" / part.name)
    for addon in addons:
        for one in folders_of(addon):
            shutil.rmtree(folder / "outrider" / one)
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the core, which every Python started meanwhile imports from."""
    folder = copied(tmp_path_factory.mktemp("core"), ADDONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def bundle(core: Path, tiny_checkpoints: tuple[Path, Path]) -> Path:
    """What the core alone exports."""
    target, draft = map(str, tiny_checkpoints)
    out = core / "bundle"
    command = outrider("export", "--target", target, "--draft", draft, "--out", str(out), *SMALL)
    subprocess.run(command, check=True)
    return out


def test_the_core_imports_without_any_add_on(core: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(core)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_core_exports_without_any_add_on(bundle: Path) -> None:
    """Graphs of accelerators are left out, and the certificate says so."""
    whole = load_bundle(bundle)
    assert not [name for name in whole.manifest.files if "device" in name or "sampler" in name]
    reason = whole.why_no_device(whole.manifest.target, "9.0")
    assert (
        reason == "target: it was exported without the add-on for accelerators; serve it on the CPU"
    )


def test_the_core_serves_without_any_add_on(bundle: Path) -> None:
    with (
        running_server(bundle, "--gamma", "2", "--device", "auto") as server,
        SyncClient(server.address) as client,
    ):
        client.wait_ready(timeout_s=60)
        output = client.complete("def", max_tokens=4, temperature=0.0)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        (("serve", "--port", "0", "--kserve"), "kserve: is not installed"),
        (("serve", "--port", "0", "--device", "cuda"), "device cuda:0: is not installed"),
        (("serve", "--port", "0", "--sampler", "device"), "sampler device: is not installed"),
        (("build",), "tensorrt: is not installed"),
    ],
)
def test_what_only_an_add_on_does_is_refused_by_name(
    bundle: Path, command: tuple[str, ...], refusal: str
) -> None:
    name, *options = command
    line = outrider(name, str(bundle), *options)
    refused = subprocess.run(line, capture_output=True, text=True, check=False)
    assert refused.returncode == EXIT_REFUSED, refused.stderr
    assert refusal in refused.stderr


@pytest.mark.parametrize("group", ["outrider.engines", "outrider.exporters", "outrider.protocols"])
def test_entry_points_are_those_of_add_ons(group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    folders = tuple(folder for addon in ADDONS for folder in folders_of(addon))
    for place in project["entry-points"][group].values():
        module = place.partition(":")[0].removeprefix("outrider.").replace(".", "/")
        assert module.startswith(folders), place
        assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__init__.py").exists()


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules that a file of tests or scripts imports, and what they import."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
    files = [
        ROOT / f"{one.replace('.', '/')}.py"
        for one in names
        if one.startswith(("tests.", "scripts."))
    ]
    return frozenset(names).union(*(imported(file) for file in files if file.exists()))


def needs(path: Path, gone: Iterable[str]) -> bool:
    """Whether a test needs what is in some folders: it, or what it imports, imports it."""
    modules = " ".join(one.replace("/", ".") for one in gone)
    return any(is_under(name.removeprefix("outrider."), modules) for name in imported(path))


def checkout_without(addon: str, folder: Path) -> Path:
    """Copy the checkout but for an add-on and the tests that need it; return the folder."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    code = folders_of(addon)
    gone = (*code, *(f"tests/{one}" for one in code), *OWN_FOLDERS.get(addon, []))
    for name in listed.splitlines():
        path = ROOT / name
        is_test = path.suffix == ".py" and name.startswith(("tests/", "scripts/"))
        if path.is_file() and not name.startswith(gone) and not (is_test and needs(path, gone)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    (folder / "sitecustomize.py").write_text(SITE)
    subprocess.run(["bash", "scripts/stage"], cwd=folder, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("addon", ADDONS)
def test_the_others_pass_their_tests_without_an_add_on(addon: str, tmp_path: Path) -> None:
    """Deleted with its folders and its tests, an add-on is missed by nobody."""
    faulthandler.cancel_dump_traceback_later()  # the tests within have that limit each
    copy = checkout_without(addon, tmp_path)
    paths = os.pathsep.join(map(str, (copy, copy / "build" / "stage")))
    # Its folder holds environments of other people's clients.
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={ROOT / '.pytest_cache'}"]
    command += ["tests/engines", "tests/export", "tests/runtime", "tests/client"]
    done = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
