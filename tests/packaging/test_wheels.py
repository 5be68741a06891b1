"""Client and server as two wheels in one namespace: what each ships, and a scratch environment with one or both."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import typer
from outrider.engines.bundle.bundle import load_bundle
from outrider.runtime.cli.main import app

from tests.environments import Environments

ROOT = Path(__file__).parents[2]
SOURCES = ("engines", "runtime", "export", "proto", "packaging", "pyproject.toml", "README.md")
OPTIMUM = "optimum/commands/register/register_outrider.py"
"""Where Optimum looks for further exports, outside of our own namespace."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None,
    reason="wheels are built with pip and setuptools of this environment, which lacks one of them",
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run without the paths of this checkout; a failure shows in the result."""
    environment = {"PATH": os.defpath, "HOME": str(cwd), "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )


def pip(*arguments: str | Path, cwd: Path) -> None:
    """Run this environment's pip, offline."""
    done = run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments),
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheels of client and server, built from a copy, so that the checkout stays as it is."""
    work = tmp_path_factory.mktemp("wheels")
    copy = work / "copy"
    copy.mkdir()
    for name in SOURCES:
        source, skipped = ROOT / name, shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=skipped)
        else:
            shutil.copy(source, copy)
    out = work / "out"
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", *options, "-w", out, "./proto", ".", cwd=copy)
    return out


def shipped(wheels: Path, distribution: str) -> set[str]:
    """Return the files of a wheel but for its own metadata."""
    with ZipFile(wheels / f"{distribution}-{VERSION}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
    return {name for name in names if ".dist-info/" not in name}


def tree(*parts: tuple[str, Path]) -> set[str]:
    """Return the files below folders of the checkout by the names that they are installed under."""
    return {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in parts
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_server_ships_no_file_of_the_client(wheels: Path):
    client, server = shipped(wheels, "outrider"), shipped(wheels, "outrider_server")
    assert {"outrider/__init__.py", "outrider/client.py", "outrider/v1/inference_pb2.py"} <= client
    assert not client & server
    assert all(name.startswith("outrider/") for name in client | server - {OPTIMUM})


def test_every_file_of_the_tree_is_shipped(wheels: Path):
    folders = [(f"outrider/{name}", ROOT / name) for name in ("engines", "runtime", "export")]
    assert shipped(wheels, "outrider_server") == tree(*folders) | {OPTIMUM}
    assert shipped(wheels, "outrider") == tree(("outrider", ROOT / "proto" / "outrider"))


@dataclass
class Environment:
    """A scratch environment that sees the third-party libraries of this one, and nothing else of it."""

    folder: Path
    wheels: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        pip("--python", self.python, *arguments, cwd=self.folder)

    def install(self, name: str) -> None:
        self.pip("install", "--no-index", "--find-links", str(self.wheels), f"{name}=={VERSION}")

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--yes", name)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(self.folder / "bin" / "outrider", *arguments, cwd=self.folder)

    def run(self, source: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-c", source, cwd=self.folder)


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> Environment:
    made = Environment(tmp_path / "environment", wheels)
    done = run(sys.executable, "-m", "venv", "--without-pip", made.folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "outrider" not in entry.name and entry.suffix != ".pth":
            (libraries / entry.name).symlink_to(entry)
    (site,) = made.folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return made


def assert_client_is_missed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "'outrider'" in line
    assert f"pip install --find-links WHEELS 'outrider=={VERSION}'" in line


def test_either_distribution_can_go_and_come_back(environment: Environment):
    environment.install("outrider-server")  # brings the client of the same version
    assert environment.command("--version").stdout == f"outrider {VERSION}\n"

    environment.uninstall("outrider-server")
    done = environment.run("from outrider import Client; print(Client.__module__)")
    assert done.stdout == "outrider.client\n", done.stderr
    done = environment.run("from outrider import LLM")
    assert "pip install 'outrider-server[cpu]'" in done.stderr

    environment.install("outrider-server")
    environment.uninstall("outrider")
    assert_client_is_missed(environment.command("--version"))
    assert_client_is_missed(environment.command("serve", "bundle"))
    module = run(environment.python, "-m", "outrider.runtime.cli", "info", cwd=environment.folder)
    assert_client_is_missed(module)

    environment.install("outrider")
    assert environment.command("--version").stdout == f"outrider {VERSION}\n"
    assert "Serve a bundle" in environment.command("serve", "--help").stdout


def optimum_cli(environment: Environment, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from optimum.commands.optimum_cli import main; main()"
    return run(environment.python, "-c", program, *arguments, cwd=environment.folder)


def test_optimum_knows_the_export_and_its_options(environment: Environment):
    environment.install("outrider-server")
    shown = optimum_cli(environment, "export", "outrider", "--help")
    assert shown.returncode == 0, shown.stderr
    given = set(re.findall(r"--[a-z-]+", shown.stdout)) - {"--help", "--model", "--assistant-model"}
    command: Any = typer.main.get_command(app).commands["export"]
    options = {option for one in command.params for option in one.opts} - {"--help"}
    assert given == options - {"--target", "--draft", "--out"}


@pytest.mark.long
def test_optimum_exports_a_pair(
    environment: Environment, tiny_checkpoints: tuple[Path, Path], tmp_path: Path
):
    environment.install("outrider-server")
    target, draft = map(str, tiny_checkpoints)
    out = tmp_path / "pair"
    options = ("--max-context", "64", "--max-gamma", "2", str(out))
    models = ("--model", target, "--assistant-model", draft)
    done = optimum_cli(environment, "export", "outrider", *models, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = load_bundle(out).manifest
    assert (manifest.max_context, manifest.max_gamma) == (64, 2)
    assert manifest.draft is not None
    again = optimum_cli(environment, "export", "outrider", *models, *options)
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith("outrider: ")


@pytest.mark.long
def test_uvx_runs_the_server_by_the_name_of_its_distribution(
    environments: Environments, wheels: Path, tmp_path: Path
):
    uvx = environments.python("uv==0.13.9").parent / "uvx"
    variables = {name: os.environ[name] for name in os.environ if name.startswith(("UV_", "PIP_"))}
    done = subprocess.run(
        [uvx, "--find-links", wheels, "--no-progress", "outrider-server", "--help"],
        cwd=tmp_path,
        env={"PATH": os.defpath, "HOME": str(tmp_path), "UV_SYSTEM_CERTS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Exact speculative decoding" in done.stdout
