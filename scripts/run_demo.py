"""Export the demo pair, start the server, stream a completion from this process, print the figures, stop."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def read_lines(path, encoding=None):\n"
START_LIMIT_S = 60.0


def outrider(*arguments: str) -> list[str]:
    """Command line of one ``outrider`` subcommand in this environment."""
    return [sys.executable, "-m", "outrider.runtime.cli", *arguments]


def ensure_bundle(bundle: Path, weights: str) -> None:
    """Export the demo pair unless this export of these very weights is there already."""
    sources = [ROOT / "demo" / part for part in ("target", "draft")]
    newest = max(path.stat().st_mtime for source in sources for path in source.iterdir())
    manifest = bundle / "manifest.json"
    if manifest.exists() and manifest.stat().st_mtime >= newest:
        return
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        outrider(
            "export", "--target", str(sources[0]), "--draft", str(sources[1]), "--out", str(bundle),
            "--weights", weights,
        ),
        check=True,
        cwd=ROOT,
    )  # fmt: skip


def wait_for_port(server: subprocess.Popen[bytes], port_file: Path) -> int:
    """Port the server bound, as soon as it has written it."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if port_file.exists() and (text := port_file.read_text().strip()):
            return int(text)
        if server.poll() is not None:
            raise SystemExit(f"demo: the server ended with code {server.returncode}")
        time.sleep(0.05)
    server.kill()
    raise SystemExit(f"demo: the server wrote no port within {START_LIMIT_S:.0f} s")


def main(
    prompt: str = PROMPT,
    max_tokens: int = 96,
    gamma: int = 4,
    temperature: float = 0.0,
    weights: str = "float32",
) -> None:
    """Run the main job end to end."""
    console = Console()
    bundle = ROOT / "bundles" / f"demo-{weights}"
    ensure_bundle(bundle, weights)
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        console.rule("server")
        server = subprocess.Popen(
            outrider("serve", str(bundle), "--port", "0", "--port-file", str(port_file), "--lb-delay-s", "0"),
            cwd=ROOT,
        )  # fmt: skip
        try:
            address = f"localhost:{wait_for_port(server, port_file)}"
            console.rule("completion")
            generate = outrider(
                "generate", "--address", address, "--prompt", prompt, "--max-tokens", str(max_tokens),
                "--gamma", str(gamma), "--temperature", str(temperature), "--trace",
            )  # fmt: skip
            subprocess.run(generate, check=True, cwd=ROOT)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
    console.rule(f"server stopped, exit code {code}")
    raise SystemExit(code)


if __name__ == "__main__":
    typer.run(main)
