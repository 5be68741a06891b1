"""The client on the oldest libraries that its distribution allows, against a server on this environment's.

Part of ``scripts/test --long``: it needs an environment of its own, made from the package index.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.environments import Environments

ROOT = Path(__file__).parents[3]
CLIENT = tomllib.loads((ROOT / "proto" / "pyproject.toml").read_text("utf-8"))["project"]
# Each of the client's libraries at the least version that its distribution allows.
OLDEST = [one.replace(">=", "==") for one in CLIENT["dependencies"]]

CALLS = """
import asyncio, sys
from outrider import Client, RequestRefused, SyncClient

async def main(address):
    async with Client(address) as client:
        await client.wait_ready(timeout_s=20)
        print(sum([len(one.tokens) async for one in client.generate("abc", max_tokens=12)]))
        print((await client.info()).model, await client.tokenize("abc"))
        try:
            [one async for one in client.generate("abc", temperature=9.0)]
        except RequestRefused as error:
            print(error.reason, error.violations[0].field)

asyncio.run(main(sys.argv[1]))
with SyncClient(sys.argv[1]) as client:
    output = client.complete("abc", max_tokens=2, temperature=0.0, logprobs=1)
    print(output.text, output.outputs[0].finish_reason, output.outputs[0].speculation.drafter)
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python(environments: Environments) -> Path:
    return environments.python(*OLDEST)


async def test_the_oldest_client_streams_asks_and_reads_refusals(python: Path, start):
    import asyncio
    import os

    async with start() as running:
        done = await asyncio.create_subprocess_exec(
            *(python, "-W", "error", "-c", CALLS, running.address),
            env={**os.environ, "PYTHONPATH": str(ROOT / "proto")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await done.communicate()
    assert done.returncode == 0, err.decode()
    assert out.decode().splitlines() == [
        "12",
        "letters [0, 1, 2]",
        "INVALID_PARAMETER sampling.temperature",
        "de length model",
    ]
