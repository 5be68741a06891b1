"""Two tenants on a server: what one takes that asks for ten times its quota, and what the other notices of it.

Requests come at random moments, whatever has been answered (open loop). The quiet tenant is measured alone and beside
the loud one, in turns. Then requests come whose deadlines are a third of what their prompts take: how soon are they
refused? Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import typer
from outrider import CallError, Client

from scripts.bench.tools.common import code_prompts
from scripts.soak.server import running_server

MOST_SHARE = 1.1
"""Of its quota that a tenant may take."""
MOST_SLOWER = 1.3
"""Times the p99 of the time to first token alone."""
MOST_REFUSAL_MS = 20.0
OVERLOAD = 10
QUIET, LOUD = "quiet", "loud"


@dataclass
class Tenant:
    """What a tenant was answered: seconds to first tokens, tokens of prompts and answers, refusals by reason."""

    first_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    async def ask(self, client: Client, prompt: str, max_tokens: int) -> None:
        """Ask for a greedy answer."""
        began_s = time.perf_counter()
        is_first = True
        try:
            async for response in client.generate(
                prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ):
                if is_first:
                    self.first_s.append(time.perf_counter() - began_s)
                is_first = False
                usage = response.finish.usage
                self.num_tokens += usage.prompt_tokens + usage.output_tokens
        except CallError as error:
            self.refused[error.reason] += 1

    @property
    def p99_ms(self) -> float:
        """Of the time to first token."""
        return float(np.percentile(self.first_s, 99)) * 1000.0


async def load(
    address: str, rates: dict[str, float], seconds: float, max_tokens: int
) -> dict[str, Tenant]:
    """Have tenants ask so often per second."""
    found = {name: Tenant() for name in rates}
    prompts = code_prompts(50, num_lines=3)
    options = (("grpc.enable_retries", 0),)

    async def arrivals(name: str, rate: float) -> None:
        rng = np.random.default_rng(len(name))
        async with (
            Client(address, tenant=name, options=options) as client,
            asyncio.TaskGroup() as tasks,
        ):
            began_s, at_s, number = time.perf_counter(), 0.0, 0
            while (at_s := at_s + float(rng.exponential(1.0 / rate))) < seconds:
                await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
                prompt = f"# {name} {number}\n{prompts[number % len(prompts)]}"
                tasks.create_task(found[name].ask(client, prompt, max_tokens))
                number += 1

    async with asyncio.TaskGroup() as tasks:
        for name, rate in rates.items():
            tasks.create_task(arrivals(name, rate))
    return found


async def refusals_ms(address: str, num_lines: int) -> tuple[list[float], Counter[str]]:
    """Return what refusals of deadlines that cannot be met took, in milliseconds, and all ends by reason."""
    took_ms, ends = [], Counter[str]()
    async with Client(address, tenant="late", options=(("grpc.enable_retries", 0),)) as client:
        texts = [f"# {number}\n" + code_prompts(1, num_lines)[0] for number in range(36)]
        first_s = []
        for text in texts[:16]:
            tenant = Tenant()
            await tenant.ask(client, text, 1)
            first_s += tenant.first_s
        if not first_s:
            raise SystemExit(
                f"no prompt was answered: {dict(tenant.refused)}; try fewer --num-lines"
            )
        for text in texts[16:]:
            began_s = time.perf_counter()
            try:
                async for _ in client.generate(text, max_tokens=1, timeout_s=min(first_s) / 3):
                    ends["OK"] += 1
            except CallError as error:
                ends[error.reason or error.code.name] += 1
                if error.reason == "HOPELESS":
                    took_ms.append((time.perf_counter() - began_s) * 1000.0)
    return took_ms, ends


def main(
    bundle: Path, quiet_per_s: float = 1.0, quota_per_s: float = 1.0, slots: int = 8, max_tokens: int = 32,
    seconds: float = 60.0, rounds: int = 3, num_lines: int = 60, gamma: str = "4", isolated: bool = False,
) -> None:  # fmt: skip
    """Measure BUNDLE with a quota of QUOTA_PER_S requests for the loud tenant, which may hold half of the slots."""
    rules = f"requests_per_s = {quota_per_s}\nburst_requests = 2\nmax_slots = {slots // 2}\n"
    alone, beside = Tenant(), Tenant()
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        tenants = Path(scratch) / "tenants.toml"
        tenants.write_text(f"[tenants.{LOUD}]\n{rules}", encoding="utf-8")
        options = ("--tenants", str(tenants), "--max-running", str(slots), "--gamma", gamma)
        options += ("--isolate-engine",) if isolated else ()
        with running_server(bundle, *options) as server:
            asyncio.run(load(server.address, {QUIET: 2.0}, 5.0, max_tokens))
            for _ in range(rounds):
                found = asyncio.run(load(server.address, {QUIET: quiet_per_s}, seconds, max_tokens))
                alone.first_s += found[QUIET].first_s
                rates = {QUIET: quiet_per_s, LOUD: OVERLOAD * quota_per_s}
                found = asyncio.run(load(server.address, rates, seconds, max_tokens))
                beside.first_s += found[QUIET].first_s
                beside.refused += found[QUIET].refused
                num_served = len(found[LOUD].first_s)
                shares.append(num_served / (quota_per_s * seconds))
                typer.echo(f"loud: {num_served} answered, refused {dict(found[LOUD].refused)}")
            took_ms, ends = asyncio.run(refusals_ms(server.address, num_lines))
    is_fair = report_shares(alone, beside, statistics.median(shares))
    raise typer.Exit(0 if report_refusals(took_ms, ends) and is_fair else 1)


def report_shares(alone: Tenant, beside: Tenant, share: float) -> bool:
    """Print what the loud tenant took and the quiet one noticed; return whether the bounds hold."""
    slower = beside.p99_ms / alone.p99_ms
    typer.echo(f"share of the quota taken: {share:.2f}; the bound is {MOST_SHARE}")
    typer.echo(
        f"p99 to first token: {alone.p99_ms:.0f} ms alone, {beside.p99_ms:.0f} ms beside, {slower:.2f} times; "
        f"the bound is {MOST_SLOWER}; refused {dict(beside.refused)}"
    )
    return share <= MOST_SHARE and slower <= MOST_SLOWER and not beside.refused


def report_refusals(took_ms: list[float], ends: Counter[str]) -> bool:
    """Print how soon deadlines that cannot be met were refused; return whether the bound holds."""
    if not took_ms:
        typer.echo(f"deadlines that cannot be met: none was refused; all ends {dict(ends)}")
        return False
    typer.echo(
        f"deadlines that cannot be met: refused after {statistics.median(took_ms):.1f} ms, at most "
        f"{max(took_ms):.1f}; the bound is {MOST_REFUSAL_MS:.0f}; all ends {dict(ends)}"
    )
    return max(took_ms) <= MOST_REFUSAL_MS


if __name__ == "__main__":
    typer.run(main)
