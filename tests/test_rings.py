"""The core stands alone: a copy without any add-on imports, serves and answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from outrider import SyncClient
from outrider.runtime.cli.refusals import EXIT_REFUSED

from scripts.lab.soak.server import outrider, running_server

ROOT = Path(__file__).parents[1]
ADDONS = ("runtime/addons",)
"""Folders that register by entry points."""
# Needs libraries that no machine without a GPU has.
UNIMPORTABLE = (
    "outrider.engines.accelerators.tensorrt",
    "outrider.engines.accelerators.device.cuda",
)
LAUNCH = """
import runpy, sys

# The checkout is installed as links, too: what is not in the copy must not be found there.
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
if __name__ == "__main__":
    runpy.run_module("outrider.runtime.cli", run_name="__main__")
"""
IMPORTS = """
import importlib, pkgutil, sys
from pathlib import Path

import launch
import outrider

assert Path(outrider.__file__).parents[1] == Path(sys.argv[1]), outrider.__file__
for found in pkgutil.walk_packages(outrider.__path__, "outrider."):
    if not found.name.startswith(tuple(sys.argv[2:])) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


def copied(folder: Path) -> Path:
    """Return a copy of the code in the layout that is installed, without add-ons."""
    for part in [
        *(ROOT / "proto" / "outrider").iterdir(),
        *(ROOT / n for n in ("engines", "runtime", "export")),
    ]:
        if part.is_dir():
            shutil.copytree(part, folder / "outrider" / part.name)
        else:
            (folder / "outrider").mkdir(exist_ok=True)
            shutil.copy(part, folder / "outrider")
    for addon in ADDONS:
        shutil.rmtree(folder / "outrider" / addon)
    (folder / "launch.py").write_text(LAUNCH)
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the core, to be imported from."""
    return copied(tmp_path_factory.mktemp("core"))


def test_the_core_imports_without_any_add_on(core: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(core), *UNIMPORTABLE],
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        cwd=core,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_core_serves_without_any_add_on(
    core: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(core))
    monkeypatch.chdir(core)
    with (
        running_server(tiny_bundle, "--gamma", "2", module="launch") as server,
        SyncClient(server.address) as client,
    ):
        client.wait_ready(timeout_s=60)
        output = client.complete("def", max_tokens=4, temperature=0.0)
    assert len(output.outputs[0].token_ids) == 4
    command = outrider("serve", str(tiny_bundle), "--port", "0", "--kserve", module="launch")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == EXIT_REFUSED, refused.stderr
    assert "kserve: is not installed" in refused.stderr


@pytest.mark.parametrize("group", ["outrider.protocols"])
def test_entry_points_are_those_of_add_ons(group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for place in project["entry-points"][group].values():
        module = place.partition(":")[0].removeprefix("outrider.").replace(".", "/")
        assert any(module.startswith(addon) for addon in ADDONS), place
        assert (ROOT / f"{module}.py").exists()
