"""Clients in Go and Java, made from the proto by the tools that Debian has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from outrider import SyncClient

from scripts.lab.soak.server import running_server

PROTO = Path(__file__).parents[2] / "proto"
SOURCES = Path(__file__).parent / "languages"
NAME, PACKAGE = "outrider/v1/inference.proto", "gen/outrider"
GO_LIBRARIES, JARS = "/usr/share/gocode", "/usr/share/java/*"


def run(*command: str | Path, **variables: str) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    ).stdout


def made_in_go(folder: Path) -> list[str]:
    """Debian's golang-go, golang-google-grpc-dev, protobuf-compiler, protoc-gen-go and protoc-gen-go-grpc."""
    into, kinds = folder / "src" / "gen", ("go", "go-grpc")
    into.mkdir(parents=True)
    told = [f"--{kind}_opt={one}" for kind in kinds for one in (f"M{NAME}={PACKAGE}", "module=gen")]
    run("protoc", f"-I{PROTO}", *(f"--{kind}_out={into}" for kind in kinds), *told, NAME)
    run(
        "go", "build", "-o", folder / "client", SOURCES / "generate.go",
        GO111MODULE="off", GOPATH=f"{folder}:{GO_LIBRARIES}", GOCACHE=str(folder / "cache"),
    )  # fmt: skip
    return [str(folder / "client")]


def made_in_java(folder: Path) -> list[str]:
    """Debian's openjdk, libgrpc-java, libnetty-java, libperfmark-java and protobuf-compiler-grpc-java-plugin."""
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_java_plugin')}"
    into = folder / "gen"
    into.mkdir()
    run("protoc", f"-I{PROTO}", f"--java_out={into}", plugin, f"--grpc_out={into}", NAME)
    sources = [*into.rglob("*.java"), SOURCES / "Generate.java"]
    run("javac", "-nowarn", "-cp", JARS, "-d", folder / "classes", *sources)
    return ["java", "-cp", f"{JARS}:{folder / 'classes'}", "Generate"]


WAYS: dict[str, tuple[Callable[[Path], list[str]], tuple[str, ...], str]] = {
    "go": (made_in_go, ("go", "protoc-gen-go-grpc"), "InvalidArgument"),
    "java": (made_in_java, ("javac", "grpc_java_plugin"), "INVALID_ARGUMENT"),
}


@pytest.mark.long
@pytest.mark.parametrize("language", WAYS)
def test_a_client_made_from_the_proto_streams_and_is_refused_by_field_and_rule(
    language: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    make, tools, code = WAYS[language]
    if missing := [one for one in ("protoc", *tools) if shutil.which(one) is None]:
        pytest.skip(f"Debian's packages of {', '.join(missing)} are not installed")
    client = make(tmp_path)
    with running_server(tiny_bundle, "--gamma", "2") as server:
        answer, refusal = run(*client, server.address, "def add").rsplit("\n", 2)[:2]
        with SyncClient(server.address) as own:
            expected = own.complete("def add", max_tokens=8, temperature=0.0).text
    assert answer == expected
    assert refusal.startswith(f"{code} sampling.temperature: must be 0 or in [0.01, 2]")
