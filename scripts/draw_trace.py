"""Draw the passes of one answer as a picture: ``python -m scripts.draw_trace BUNDLE`` makes docs/trace.svg.

One row per pass of the target: the drafted tokens by what became of them, then the token that the target added.

Source: Leviathan et al. 2023 (arXiv:2211.17192), figure 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from html import escape
from pathlib import Path

import typer
from outrider import Client
from outrider.v1 import inference_pb2 as wire

from scripts.bench.tools.results import ROOT
from scripts.soak.server import running_server

PROMPT = "def main():\n    parser = argparse.ArgumentParser()\n"
MAX_TOKENS, GAMMA = 42, 5
# Per kind of token: fill, edge and text colour, and what the legend says.
KINDS = {
    "accepted": ("#dcf5e3", "#2e9e52", "#14532d", "draft token, accepted"),
    "rejected": ("#fde2e1", "#d1453b", "#8f1d16", "draft token, rejected"),
    "unjudged": ("#f3f4f6", "#d1d5db", "#9ca3af", "drafted behind a rejected one: dropped"),
    "recovered": ("#dbeafe", "#2563eb", "#1e3a8a", "recovered: the target's token instead"),
    "bonus": ("#ede9fe", "#7c3aed", "#4c1d95", "bonus: all were accepted, and one more"),
    "plain": ("#ffffff", "#6b7280", "#374151", "nothing drafted: the target alone"),
}
CHARACTER, ROW, BOX, GAP, LEFT, MARGIN = 8.4, 27, 21, 4, 62, 20  # pixels; of a 14 px monospace font
WIDTH = 720

Token = tuple[str, str]  # kind, text


def step_tokens(step: wire.Step) -> list[Token]:
    """Return the tokens of one pass with their kinds, in the order in which they were drafted and added."""
    kept, drafted = step.num_accepted, list(step.drafted_text)
    if not drafted:  # a prompt's pass, or a plain one
        return [("plain", step.next_text)]
    tokens = [("accepted", text) for text in drafted[:kept]]
    if not step.HasField("next_token"):  # the answer ended among the accepted tokens
        return tokens
    tokens += [("rejected", text) for text in drafted[kept : kept + 1]]
    tokens += [("unjudged", text) for text in drafted[kept + 1 :]]
    return [*tokens, ("bonus" if kept == len(drafted) else "recovered", step.next_text)]


def visible(text: str) -> str:
    """Return the text with a sign for each blank, newline and tab."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def box(x: float, y: float, token: Token) -> tuple[str, float]:
    """Return a token's box at a corner, and where the next one begins."""
    kind, text = token[0], visible(token[1])
    fill, edge, colour, _ = KINDS[kind]
    inner = CHARACTER * len(text)
    width = inner + 10
    drawn = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="4" fill="{fill}" stroke="{edge}"/>'
        f'<text x="{x + 5:.1f}" y="{y + 15}" fill="{colour}" textLength="{inner:.1f}">{escape(text)}</text>'
    )
    if kind == "rejected":
        line = f"M{x + 3:.1f} {y + BOX / 2}h{width - 6:.1f}"
        drawn += f'<path d="{line}" stroke="{edge}" stroke-width="1.3" opacity="0.8"/>'
    return drawn, x + width + GAP


def legend(y: int) -> list[str]:
    """Return the lines that say what the colours mean, two columns of them."""
    drawn = []
    for index, (fill, edge, _, meaning) in enumerate(KINDS.values()):
        x, top = MARGIN + 330 * (index % 2), y + 22 * (index // 2)
        drawn.append(
            f'<rect x="{x}" y="{top}" width="16" height="14" rx="3" fill="{fill}" stroke="{edge}"/>'
            f'<text class="note" x="{x + 24}" y="{top + 12}">{meaning}</text>'
        )
    return drawn


def draw(prompt: str, steps: Sequence[wire.Step]) -> str:
    """Return the SVG of an answer's passes."""
    rows = [step_tokens(step) for step in steps]
    emitted = [sum(kind not in ("rejected", "unjudged") for kind, _ in row) for row in rows]
    title = (
        f"{sum(emitted)} tokens in {len(rows)} passes of the target: "
        f"{sum(emitted) / len(rows):.1f} tokens per pass instead of 1"
    )
    drawn = [
        f'<text class="title" x="{MARGIN}" y="34">{title}</text>',
        f'<text class="note" x="{MARGIN}" y="56">The answer to {escape(visible(prompt))}</text>',
        *legend(70),
    ]
    for number, row in enumerate(rows, start=1):
        y = 150 + ROW * (number - 1)
        drawn.append(f'<text class="note" x="{MARGIN}" y="{y + 15}">pass {number}</text>')
        x: float = LEFT + MARGIN
        for token in row:
            piece, x = box(x, y, token)
            drawn.append(piece)
        count = emitted[number - 1]
        tokens = "1 token" if count == 1 else f"{count} tokens"
        drawn.append(
            f'<text class="note" x="{WIDTH - MARGIN}" y="{y + 15}" text-anchor="end">{tokens}</text>'
        )
    height = 150 + ROW * len(rows) + MARGIN - 6
    style = (
        "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".note{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#4b5563}"
        ".title{font:600 17px system-ui,'DejaVu Sans',sans-serif;fill:#111827}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
            f'<title>{title}</title><style>{style}</style><rect width="100%" height="100%" rx="10" fill="#fff"/>',
            *drawn,
            "</svg>\n",
        ]
    )


async def ask(address: str) -> list[wire.Step]:
    """Return the passes of one greedy answer."""
    async with Client(address) as client:
        responses = client.generate(
            PROMPT, return_trace=True, temperature=0.0, max_tokens=MAX_TOKENS
        )
        return [step async for response in responses for step in response.steps]


def main(bundle: Path, out: Path = ROOT / "docs" / "trace.svg") -> None:
    """Serve a bundle, ask for one greedy answer and draw its passes."""
    with running_server(bundle, "--gamma", str(GAMMA)) as server:
        steps = asyncio.run(ask(server.address))
    out.write_text(draw(PROMPT, steps), encoding="utf-8")
    typer.echo(f"{out}: {len(steps)} passes")


if __name__ == "__main__":
    typer.run(main)
