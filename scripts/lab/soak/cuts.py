"""Mixed requests over gRPC and HTTP, a third of them left at a random moment: none is lost, answered twice, or wrong.

    python -m scripts.lab.soak.cuts BUNDLE

Greedy answers are compared with those of plain decoding, cut ones as beginnings of them; the audit log must have each
request once.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import typer
from outrider import Client
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.run import check_idle
from scripts.lab.soak.server import running_server
from scripts.lab.soak.verdict import finish
from scripts.tools.common import code_prompts

LONGEST = 48
# Of gRPC: every ending is to be seen.
OPTIONS = (("grpc.enable_retries", 0), ("grpc.service_config", "{}"))
Part = tuple[str, bool]
"""Text, and whether it is the last of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request; it is left after so many parts, which may come to none, or read to its end."""

    name: str
    prompt: str
    max_tokens: int
    is_http: bool
    cut_after: int | None


def draw(number: int, prompts: Sequence[str], rng: random.Random) -> Asked:
    """Return a request; a third of them are cut."""
    return Asked(
        name=f"cut-{number}",
        prompt=rng.choice(prompts),
        max_tokens=rng.randint(1, LONGEST),
        is_http=rng.random() < 0.5,
        cut_after=rng.randint(0, 6) if rng.random() < 1 / 3 else None,
    )


async def over_grpc(client: Client, asked: Asked) -> AsyncGenerator[Part]:
    """Yield the parts of an answer."""
    answers = client.generate(
        asked.prompt,
        request_id=asked.name,
        max_tokens=asked.max_tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    async with aclosing(cast("AsyncGenerator[wire.GenerateResponse]", answers)) as parts:
        async for part in parts:
            yield part.text, part.HasField("finish")


async def over_http(port: int, asked: Asked) -> AsyncGenerator[Part]:
    """Yield the parts of an answer; HTTP/1.0 has no chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "prompt": asked.prompt, "max_tokens": asked.max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "request_id": asked.name,
        }
    ).encode()  # fmt: skip
    kind = "host: localhost\r\ncontent-type: application/json"
    head = f"POST /v1/completions HTTP/1.0\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        async for line in lines(reader):
            if line == b"data: [DONE]":
                yield "", True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])["choices"][0]["text"], False
    finally:
        writer.close()


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield what comes, line by line."""
    while line := await reader.readline():
        yield line.strip()


async def ask(client: Client, port: int, asked: Asked) -> tuple[str, int]:
    """Return the text that came, and how many ends."""
    text, num_ends, num_parts = "", 0, 0
    parts = over_http(port, asked) if asked.is_http else over_grpc(client, asked)
    async with aclosing(parts):
        while num_parts != asked.cut_after:
            part = await anext(parts, None)
            if part is None:
                break
            text, num_ends, num_parts = text + part[0], num_ends + part[1], num_parts + 1
    return text, num_ends


async def plain(client: Client, prompts: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return the answers of plain decoding, by prompt and length."""
    found = {}
    for prompt in prompts:
        for length in range(1, LONGEST + 1):
            answers = client.generate(
                prompt,
                max_tokens=length,
                temperature=0.0,
                ignore_eos=True,
                speculation={"enabled": False},
            )
            found[prompt, length] = "".join([one.text async for one in answers])
    return found


async def drive(
    address: str, port: int, all_asked: Sequence[Asked], streams: int
) -> tuple[list[str], Mapping[str, int]]:
    """Return what is wrong, and how the requests ended."""
    waiting, problems, endings = iter(all_asked), list[str](), Counter[str]()
    async with Client(address, options=OPTIONS) as client:
        await client.wait_ready(timeout_s=60)
        right = await plain(client, sorted({one.prompt for one in all_asked}))

        async def one_stream() -> None:
            for asked in waiting:
                text, num_ends = await ask(client, port, asked)
                expected = right[asked.prompt, asked.max_tokens]
                protocol = "HTTP" if asked.is_http else "gRPC"
                endings[f"{protocol}, {'whole' if num_ends else 'left'}"] += 1
                is_right = text == expected if num_ends else expected.startswith(text)
                if not is_right or num_ends > 1 or (not num_ends and asked.cut_after is None):
                    problems.append(f"{asked}: {num_ends} ends, {text!r} for {expected!r}")

        await asyncio.gather(*(one_stream() for _ in range(streams)))
        problems += await check_idle(client)
    return problems, endings


def check_audit(path: Path, all_asked: Sequence[Asked]) -> list[str]:
    """Return what is wrong with the audit log: a request that was read has one line; one that was left has one at most.

    Who leaves before anything is read is nobody's request.
    """
    names = Counter(json.loads(line)["request_id"] for line in path.read_text().splitlines())
    problems = [f"{one.name}: {names[one.name]} lines" for one in all_asked if names[one.name] > 1]
    read = [one.name for one in all_asked if one.cut_after is None]
    return problems + [f"{name}: no line" for name in read if not names[name]]


def main(
    bundle: Path,
    requests: int = 10_000,
    streams: int = 48,
    seed: int = 0,
    http_port: int = 8196,
) -> None:
    """Send the requests to a server process of BUNDLE, and exit 1 on any violation."""
    rng, prompts = random.Random(seed), code_prompts(20, num_lines=3)
    all_asked = [draw(number, prompts, rng) for number in range(requests)]
    with tempfile.TemporaryDirectory() as scratch:
        audit = Path(scratch) / "audit"
        options = ("--http-port", str(http_port), "--audit-log", str(audit))
        with running_server(bundle, *options) as server:
            problems, endings = asyncio.run(drive(server.address, http_port, all_asked, streams))
        problems += check_audit(audit, all_asked)
    finish("cuts", {"requests": requests, **endings, "violations": len(problems)}, problems)


if __name__ == "__main__":
    typer.run(main)
