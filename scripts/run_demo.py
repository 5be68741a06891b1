"""Export the demo pair, serve it, stream a completion with drafts and without, print both side by side, stop."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from outrider import Client
from outrider.runtime.cli.trace import print_report, print_step, whole_text
from outrider.v1 import inference_pb2 as wire
from rich.console import Console

from scripts.lab.soak.server import outrider, running_server
from scripts.tools.results import ROOT

PROMPT = "def read_lines(path, encoding=None):\n"
CONTEXT = 1024
SENTENCE = "translate English to German: The file could not be opened for reading."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed completion.

    Attributes:
        token_ids: of the completion.
        seconds: from the request to the end of the stream.
        tokens_per_pass: tokens emitted per pass of the target.
    """

    token_ids: tuple[int, ...]
    seconds: float
    tokens_per_pass: float


def ensure_bundle(bundle: Path, pair: Path, weights: str) -> None:
    """Export a pair of checkpoints unless this export of these very weights is there already."""
    sources = [pair / part for part in ("target", "draft")]
    newest = max(path.stat().st_mtime for source in sources for path in source.iterdir())
    manifest = bundle / "manifest.json"
    if manifest.exists() and manifest.stat().st_mtime >= newest:
        return
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    models = ("--target", str(sources[0]), "--draft", str(sources[1]))
    limits = ("--weights", weights, "--max-context", str(CONTEXT))
    export = outrider("export", *models, "--out", str(bundle), *limits)
    subprocess.run(export, check=True, cwd=ROOT)


async def stream(
    client: Client, show: Callable[[wire.GenerateResponse], None], **request: Any
) -> Answer:
    """Stream one completion.

    Args:
        client: of the server.
        show: called with each response.
        request: prompt and options of ``Client.generate``.
    """
    token_ids: list[int] = []
    tokens_per_pass = 1.0
    began = time.perf_counter()
    async for response in client.generate(**request):
        token_ids += [token.id for token in response.tokens]
        if response.finish.speculation.HasField("tokens_per_step"):
            tokens_per_pass = response.finish.speculation.tokens_per_step
        show(response)
    seconds = time.perf_counter() - began
    return Answer(token_ids=tuple(token_ids), seconds=seconds, tokens_per_pass=tokens_per_pass)


def comparison(drafted: Answer, plain: Answer, *, is_greedy: bool) -> list[str]:
    """Return the lines that set a completion with drafts beside the same one without."""
    rows = [
        ("", "with drafts", "without"),
        ("time", *(f"{one.seconds:.3f} s" for one in (drafted, plain))),
        ("tokens", *(str(len(one.token_ids)) for one in (drafted, plain))),
        ("tokens per target pass", *(f"{one.tokens_per_pass:.2f}" for one in (drafted, plain))),
    ]
    speed_up = (len(drafted.token_ids) / drafted.seconds) / (len(plain.token_ids) / plain.seconds)
    same = "yes" if drafted.token_ids == plain.token_ids else "NO"
    if not is_greedy:
        same = "not compared: above temperature 0 only the distribution is the same"
    return [
        *(f"{name:<24}{left:>14}{right:>14}" for name, left, right in rows),
        f"speed-up: {speed_up:.2f}",
        f"same tokens: {same}",
    ]


async def compare(address: str, console: Console, request: dict[str, Any], gamma: int) -> bool:
    """Stream a prompt with drafts and without, and print both side by side.

    Each is streamed twice, in turns: the first answers are shown, the second ones timed.

    Returns:
        False when a greedy completion has other tokens with drafts than without.
    """
    num_passes = 0
    text = ""

    def trace(response: wire.GenerateResponse) -> None:
        nonlocal num_passes, text
        text += response.text
        for step in response.steps:
            num_passes += 1
            print_step(console, num_passes, step)
        if response.HasField("finish"):
            shown = whole_text(request["prompt"], text, info)
            console.print(f"\n{shown}\n", markup=False, highlight=False, soft_wrap=True)
            print_report(console, response.finish)

    def print_text(response: wire.GenerateResponse) -> None:
        console.print(response.text, end="", markup=False, highlight=False, soft_wrap=True)

    with_drafts = {**request, "speculation": {"gamma": gamma}}
    without = {**request, "speculation": {"enabled": False}}
    async with Client(address) as client:
        info = await client.info()
        console.rule(f"with drafts, gamma {gamma}")
        await stream(client, trace, **with_drafts, return_trace=True)
        console.rule("the same prompt without drafts")
        await stream(client, print_text, **without)
        console.print()
        console.rule("side by side, each streamed once more")
        drafted = await stream(client, lambda _: None, **with_drafts)
        plain = await stream(client, lambda _: None, **without)
    is_greedy = request["temperature"] == 0.0
    for line in comparison(drafted, plain, is_greedy=is_greedy):
        console.print(line, markup=False, highlight=False)
    return drafted.token_ids == plain.token_ids or not is_greedy


def demonstrate(bundle: Path, request: dict[str, Any], gamma: int) -> int:
    """Serve a bundle, compare, stop the server.

    Returns:
        Exit code: 1 when a greedy completion has other tokens with drafts.
    """
    console = Console()
    console.rule("server")
    with running_server(bundle) as server:
        is_same = asyncio.run(compare(server.address, console, request, gamma))
    console.rule("server stopped, exit code 0")
    return int(not is_same)


def main(
    prompt: str = "",
    max_tokens: int = 96,
    gamma: int = 4,
    temperature: float = 0.0,
    weights: str = "float32",
    translate: bool = False,
) -> None:
    """Run the main job end to end, with the pair that continues programs or the one that translates."""
    pair, name = (ROOT / "demo" / "ende", "ende") if translate else (ROOT / "demo", "demo")
    bundle = ROOT / "bundles" / f"{name}-{weights}"
    ensure_bundle(bundle, pair, weights)
    prompt = prompt or (SENTENCE if translate else PROMPT)
    request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
    raise SystemExit(demonstrate(bundle, request, gamma))


if __name__ == "__main__":
    typer.run(main)
