"""Health beside long texts: 64 prompts of the most bytes that are tokenised, and 16 of 1 MiB."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider import CallError, Client
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.runtime.serving.tokenizer import TokenizersCodec

from scripts.bench.tools.common import code_prompts
from scripts.soak.run import check_idle
from scripts.soak.server import running_server
from scripts.soak.verdict import MIB, finish

MOST_P99_S = 0.25
PAUSE_S = 0.005
"""Between two health checks."""
RETRYABLE = "QUEUE_FULL"


async def check_health(address: str, texts: Sequence[str]) -> tuple[list[float], Counter[str]]:
    """Send texts all at once, each again until it is answered, and check health meanwhile.

    Returns:
        Seconds of each health check, sorted; and the ends of the requests.
    """
    ends, seconds = Counter[str](), list[float]()
    async with Client(address, options=(("grpc.enable_retries", 0),)) as client:
        await client.wait_ready(timeout_s=60)

        async def send(text: str) -> None:
            while True:
                try:
                    async for _ in client.generate(text, max_tokens=1, temperature=0.0):
                        pass
                    ends["OK"] += 1
                    return
                except CallError as error:
                    ends[error.reason or error.code.name] += 1
                    if error.reason != RETRYABLE:
                        return
                    await asyncio.sleep(error.retry_after_s or 0.0)

        sending = asyncio.gather(*map(send, texts))
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not sending.done():
                began = time.perf_counter()
                await health.Check(health_pb2.HealthCheckRequest())
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(PAUSE_S)
        await sending
        ends.update(dict.fromkeys(await check_idle(client), 1))
    return sorted(seconds), ends


def text_of(num_bytes: int) -> str:
    """Return a text of code, of so many bytes."""
    text = "".join(code_prompts(40)).encode("ascii", "replace").decode()
    return (text * (num_bytes // len(text) + 1))[:num_bytes]


def byte_limit(bundle: Path) -> int:
    """Return the bytes of the longest text that a server of a bundle tokenises."""
    longest = TokenizersCodec(bundle / TOKENIZER_FILE).max_token_bytes
    context = load_bundle(bundle).manifest.max_context
    return MIB if longest is None else min(MIB, (context - 1) * longest)


def main(bundle: Path, at_limit: int = 64, of_a_mib: int = 16) -> None:
    """Check health beside long texts, and exit 1 where the 99th percentile takes 250 ms or more."""
    limit = byte_limit(bundle)
    texts = [text_of(limit)] * at_limit + [text_of(MIB)] * of_a_mib
    with running_server(bundle, "--gamma", "4") as server:
        seconds, ends = asyncio.run(check_health(server.address, texts))
    p99_s = seconds[int(0.99 * len(seconds))]
    figures = {
        "bytes at the limit": limit, "health checks": len(seconds), "p50 ms": f"{seconds[len(seconds) // 2] * 1e3:.1f}",
        "p99 ms": f"{p99_s * 1e3:.1f}", "longest ms": f"{seconds[-1] * 1e3:.1f}",
        **{f"ended: {end}": count for end, count in sorted(ends.items())},
    }  # fmt: skip
    problem = f"health takes {p99_s * 1e3:.0f} ms at the 99th percentile"
    finish("health beside long texts", figures, [problem] if p99_s >= MOST_P99_S else [])


if __name__ == "__main__":
    typer.run(main)
