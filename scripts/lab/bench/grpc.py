"""The cost of serving: tokens per second in process and through gRPC, against bare engine calls of the same shapes.

The bound is the in-process run's tokens over the seconds it spent inside engine calls: a runtime and a transport that
cost nothing would reach it. Client and server share the machine, but not the two engines: ONNX Runtime's threads
spin for some 40 ms after a call, so each side starts when the other's have gone to sleep.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from outrider import Client
from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.params import SpeculationParams

from scripts.lab.soak.server import running_server
from scripts.tools.common import PAUSE_S, Rig, code_prompts, open_rig
from scripts.tools.results import Recorder, Row
from scripts.tools.tables import show

MAX_BATCH = 8
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round at one batch size, in tokens per second."""

    bound: float
    in_process: float
    through_grpc: float


def run_in_process(
    rig: Rig, group: Sequence[Sequence[int]], gamma: int, max_tokens: int
) -> tuple[int, float, float]:
    """Output tokens of one batch, wall seconds and seconds inside the engines."""
    speculation = SpeculationParams(is_enabled=gamma > 0, gamma=gamma)
    time.sleep(PAUSE_S)
    engine_before = rig.engine_s()
    finished, wall_s = rig.run(group, GREEDY, speculation, max_tokens)
    return sum(one.num_output for one in finished), wall_s, rig.engine_s() - engine_before


async def count_tokens(client: Client, prompt: Sequence[int], gamma: int, max_tokens: int) -> int:
    """Tokens of one streamed completion."""
    stream = client.generate(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation={"gamma": gamma}
    )  # fmt: skip
    return sum([len(response.tokens) async for response in stream])


async def run_through_grpc(
    client: Client, group: Sequence[Sequence[int]], gamma: int, max_tokens: int
) -> tuple[int, float]:
    """Output tokens of one batch of streams and wall seconds."""
    await asyncio.sleep(PAUSE_S)
    began = time.perf_counter()
    counts = (count_tokens(client, prompt, gamma, max_tokens) for prompt in group)
    return sum(await asyncio.gather(*counts)), time.perf_counter() - began


async def measure(
    rig: Rig, client: Client, prompts: Sequence[Sequence[int]], batch: int, gamma: int, max_tokens: int
) -> Round:  # fmt: skip
    """One round: batch by batch in process and through gRPC, in alternating order, so that both meet the same load.

    Raises:
        RuntimeError: the two did not emit the same number of tokens.
    """
    num_tokens, wall_s, engine_s, grpc_s = 0, 0.0, 0.0, 0.0
    for number, first in enumerate(range(0, len(prompts) - batch + 1, batch)):
        group = prompts[first : first + batch]
        streamed = None
        if number % 2:
            streamed = await run_through_grpc(client, group, gamma, max_tokens)
        num_group, group_wall_s, group_engine_s = run_in_process(rig, group, gamma, max_tokens)
        if streamed is None:
            streamed = await run_through_grpc(client, group, gamma, max_tokens)
        num_streamed, group_grpc_s = streamed
        if num_group != num_streamed:
            raise RuntimeError(f"{num_group} tokens in process, {num_streamed} through gRPC")
        num_tokens += num_group
        wall_s += group_wall_s
        engine_s += group_engine_s
        grpc_s += group_grpc_s
    return Round(
        bound=num_tokens / engine_s,
        in_process=num_tokens / wall_s,
        through_grpc=num_tokens / grpc_s,
    )


def summarise(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians of the rounds; shares are medians of each round's own ratio to its bound."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(map(of, rounds))

    return {
        "bound": median(lambda one: one.bound),
        "in_process": median(lambda one: one.in_process),
        "through_grpc": median(lambda one: one.through_grpc),
        "in_process_share": median(lambda one: one.in_process / one.bound),
        "through_grpc_share": median(lambda one: one.through_grpc / one.bound),
    }


async def compare(
    rig: Rig, address: str, texts: Sequence[str], batches: Sequence[int], gamma: int, max_tokens: int, rounds: int
) -> dict[int, list[Round]]:  # fmt: skip
    """Return the rounds of every batch size, after one that warms both sides up."""
    prompts = [rig.tokenizer.encode(text) for text in texts]
    taken: dict[int, list[Round]] = {batch: [] for batch in batches}
    async with Client(address) as client:
        await client.wait_ready(timeout_s=60)
        for number in range(rounds + 1):
            for batch in batches:
                group = prompts if number else prompts[:batch]
                one = await measure(rig, client, group, batch, gamma, max_tokens)
                if number:
                    taken[batch].append(one)
    return taken


def main(
    bundle: Path,
    batches: str = "1,8",
    gamma: int = 4,
    num_prompts: int = 16,
    max_tokens: int = 96,
    rounds: int = 5,
    threads: int = 2,
    json_out: Path | None = None,
) -> None:
    """Measure in process and through a server process in turns, and print medians beside the bound."""
    sizes = [int(one) for one in batches.split(",")]
    if not all(1 <= size <= min(MAX_BATCH, num_prompts) for size in sizes):
        raise typer.BadParameter(f"each must be in 1..{min(MAX_BATCH, num_prompts)}")
    recorder = Recorder("grpc", "tokens per second in process and through gRPC", threads)
    rig = open_rig(bundle, max_batch=MAX_BATCH, num_threads=threads)
    options = ("--max-running", str(MAX_BATCH), "--threads", str(threads))
    with running_server(bundle, *options) as server:
        taken = asyncio.run(
            compare(
                rig, server.address, code_prompts(num_prompts), sizes, gamma, max_tokens, rounds
            )
        )
    measured = [
        Row(case={"bundle": bundle.name, "batch": batch, "gamma": gamma}, figures=summarise(rounds))
        for batch, rounds in taken.items()
    ]
    show(
        measured,
        f"{bundle.name}: tokens/s, greedy, medians of {rounds} interleaved rounds",
    )
    settings = {"num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds}
    recorder.write(json_out, measured, settings)


if __name__ == "__main__":
    typer.run(main)
