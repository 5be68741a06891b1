"""A Ray cluster of several nodes on this machine, in an environment of its own, and the application on it.

Ray listens on this machine's own address beside the loopback's; nothing leaves the machine. Every node's proxy listens
on the same port, and the kernel gives each connection to one of them.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.tools.results import ROOT
from tests.ports import free_ports

PATIENCE_S = 240.0
# Of a node, which Ray would choose by itself, and wait for.
PORTS = (
    "dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port",
    "node-manager-port", "object-manager-port",
)  # fmt: skip
PACKAGES = ("ray[serve]", "onnxruntime", "numba", "numpy", "tokenizers", "grpcio", "grpcio-status",
            "grpcio-health-checking", "grpcio-reflection", "jinja2", "protobuf", "prometheus-client", "typer", "rich",
            "uvloop")  # fmt: skip
"""What ``outrider-server[cpu,ray]`` needs; the code itself is this checkout's."""


def environment() -> Path:
    """Return the folder of Ray's environment (RAY_VENV, else .venv-ray), made where there is none.

    Raises:
        CalledProcessError: a package cannot be installed.
    """
    folder = Path(os.environ.get("RAY_VENV", ROOT / ".venv-ray"))
    if not (folder / "bin" / "ray").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES]
        subprocess.run(pip, check=True)
    return folder


@dataclass(slots=True)
class Cluster:
    """Nodes that run, the first of them the head.

    Attributes:
        venv: folder of Ray's environment.
        scratch: folder for what Ray writes.
        nodes: processes of ``ray start --block``; None for those that were killed.
    """

    venv: Path
    scratch: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    ports: tuple[int, int] = field(default_factory=lambda: tuple(free_ports(2)))  # type: ignore[arg-type,return-value]
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    nodes: list[subprocess.Popen[bytes] | None] = field(default_factory=list)

    @property
    def target(self) -> str:
        """The gRPC target of the nodes' proxies."""
        return f"127.0.0.1:{self.ports[0]}"

    def add_node(self, num_cpus: int = 1) -> None:
        """Start a node, the head if it is the first, and return once it has joined."""
        join = [f"--address=127.0.0.1:{self.port}"]
        if not self.nodes:
            join = [
                "--head",
                f"--port={self.port}",
                f"--temp-dir={self.scratch}",
                "--include-dashboard=false",
            ]
        ports = [
            f"--{name}={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)
        ]
        command = [
            str(self.venv / "bin" / "ray"), "start", "--block", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}",
            "--object-store-memory=100000000", "--disable-usage-stats", *join, *ports,
        ]  # fmt: skip
        written = self.scratch / f"node-{len(self.nodes)}.log"
        with written.open("wb") as log:
            node = subprocess.Popen(command, env=self._variables, stdout=log, stderr=log)
        self.nodes.append(node)
        wait_for(lambda: b"Ray runtime started" in written.read_bytes(), node)

    def deploy(self, **args: Any) -> None:
        """Serve with these arguments of ``build_app``, and return once replicas are ready.

        Raises:
            CalledProcessError: the application cannot be deployed.
        """
        program = str(Path(__file__).with_name("ray_app.py"))
        self.run(program, f"127.0.0.1:{self.port}", *map(str, self.ports), json.dumps(args))

    def run(self, *arguments: str) -> None:
        """Run Python in Ray's environment.

        Raises:
            CalledProcessError: it failed.
        """
        command = [str(self.venv / "bin" / "python"), *arguments]
        subprocess.run(
            command, env=self._variables, check=True, timeout=PATIENCE_S, stderr=subprocess.DEVNULL
        )

    def kill_node(self, index: int) -> None:
        """End every process of a node at once, as where a machine is switched off."""
        node, self.nodes[index] = self.nodes[index], None
        assert node is not None
        for process in [
            *psutil.Process(node.pid).children(recursive=True),
            psutil.Process(node.pid),
        ]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()

    def kill_replica(self, index: int) -> None:
        """End the process of a node's replica without a word."""
        node = self.nodes[index]
        assert node is not None
        for process in psutil.Process(node.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "ServeReplica:outrider" in " ".join(process.cmdline()):
                    process.kill()

    @property
    def _variables(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(ROOT / "build" / "stage"),
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }


@contextmanager
def running_cluster(num_nodes: int) -> Iterator[Cluster]:
    """A cluster of so many nodes with a processor each, while the block runs."""
    if not (ROOT / "build" / "stage").exists():
        subprocess.run(["bash", str(ROOT / "scripts" / "stage")], check=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(environment(), Path(scratch))
        try:
            for _ in range(num_nodes):
                cluster.add_node()
            yield cluster
        finally:
            for index, node in reversed([*enumerate(cluster.nodes)]):
                if node is not None:
                    cluster.kill_node(index)


def wait_for(is_there: Callable[[], bool], node: subprocess.Popen[bytes]) -> None:
    """Return once something is there.

    Raises:
        RuntimeError: the node has ended, or it took too long.
    """
    ends_s = time.monotonic() + PATIENCE_S
    while not is_there():
        if node.poll() is not None or time.monotonic() > ends_s:
            raise RuntimeError(f"the node has not started: {node.poll()}")
        time.sleep(0.1)
