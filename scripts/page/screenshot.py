"""Take a picture of the page with an answer: ``python -m scripts.page.screenshot BUNDLE`` makes docs/speculation.png.

It needs Debian's chromium, and an interpreter with playwright:
``python -m venv .venv-playwright && .venv-playwright/bin/python -m pip install playwright==1.65.2``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.bench.tools.results import ROOT
from scripts.soak.server import running_server

PROMPT = "def read_lines(path, encoding=None):\n"
SIZE = {"width": 1100, "height": 800}  # pixels; the page is as high as it is
# Until drafts that were not kept have faded.
FADED_MS = 4000


def steps(picture: Path, prompt: str, gamma: str) -> list[Any]:
    """Return what to do at the page: a first run, in which the server warms up, and another, which is taken."""
    run = [
        ("click", ["#run"], {}),
        ("wait_for_selector", ["#abort:not(:disabled)"], {}),
        ("wait_for_selector", ["#on[data-state=done]"], {}),
        ("wait_for_selector", ["#abort:disabled"], {}),
    ]
    return [
        ("fill", ["#prompt", prompt], {}),
        ("fill", ["#gamma", gamma], {}),
        *run,
        *run,
        ("wait_for_timeout", [FADED_MS], {}),
        ("screenshot", [], {"path": str(picture.resolve()), "full_page": True}),
    ]


def main(
    bundle: Annotated[Path, typer.Argument(help="Bundle to serve.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")] = ROOT / "docs" / "speculation.png",
    python: Annotated[Path, typer.Option(help="Interpreter that has playwright.")] = (
        ROOT / ".venv-playwright" / "bin" / "python"
    ),
    prompt: Annotated[str, typer.Option(help="Prompt to answer.")] = PROMPT,
    gamma: Annotated[str, typer.Option(help="Tokens to draft per pass, or auto.")] = "auto",
) -> None:
    """Serve a bundle, answer a prompt on the page, and take a picture of it."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise typer.BadParameter("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "http-port"
        options = ("--http-port", "0", "--http-port-file", str(port_file))
        with running_server(bundle, *options):
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/"
            context = {"viewport": SIZE}
            task = {"chromium": chromium, "url": url, "context": context}
            task["steps"] = steps(out, prompt, gamma)
            command = [python, Path(__file__).parent / "browser.py", json.dumps(task)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
    seen = json.loads(done.stdout)
    typer.echo(f"{seen['status']} Passes: {seen['outcome']['passes']}.")


if __name__ == "__main__":
    typer.run(main)
