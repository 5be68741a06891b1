"""Records anew what the judges hold: ``python -m tests.judges.record [requests] [outcomes] [surface] [bundles]``.

All of it by default.
``requests`` draws requests again, which is seldom meant; the others are what a change of behaviour changes.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from outrider.runtime.serving.settings import ServeOptions

from tests.judges.bundles import bundles
from tests.judges.outcomes import Outcome, of_grpc, of_http
from tests.judges.requests import Asked, drawn
from tests.judges.surface import surface
from tests.runtime.conftest import running
from tests.runtime.serving.chat.test_requests import TOKENIZER, chat_server
from tests.runtime.serving.http.client import serving_http

HERE = Path(__file__).parent
REQUESTS, OUTCOMES, SURFACE, BUNDLES = (
    HERE / name
    for name in ("requests.jsonl.gz", "outcomes.jsonl.gz", "surface.json", "bundles.json")
)


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    text = "".join(f"{json.dumps(one, sort_keys=True)}\n" for one in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def write_table(path: Path, table: Any) -> None:
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def kept_requests() -> list[Asked]:
    return [
        Asked(way, method, base64.b64decode(body)) for way, method, body in read_lines(REQUESTS)
    ]


async def outcomes(requests: Sequence[Asked]) -> list[Outcome]:
    """Return what becomes of requests, one after the other, on a server with all protocols."""
    options = ServeOptions(has_kserve=True, has_vllm_grpc=True)
    start = partial(running, tokenizer=TOKENIZER.to_str().encode(), **chat_server())
    async with (
        serving_http(start, serve_options=options) as http,
        grpc.aio.insecure_channel(http.running.address) as channel,
    ):
        return [
            await (of_grpc(channel, one) if one.method.count("/") == 2 and "." in one.method else of_http(http, one))
            for one in requests
        ]  # fmt: skip


def main(names: Sequence[str]) -> None:
    wanted = names or ("requests", "outcomes", "surface", "bundles")
    if "requests" in wanted:
        lines = [(one.way, one.method, base64.b64encode(one.body).decode()) for one in drawn()]
        write_lines(REQUESTS, lines)
    if "outcomes" in wanted:
        write_lines(OUTCOMES, asyncio.run(outcomes(kept_requests())))
    if "surface" in wanted:
        write_table(SURFACE, surface())
    if "bundles" in wanted:
        write_table(BUNDLES, bundles())


if __name__ == "__main__":
    main(sys.argv[1:])
