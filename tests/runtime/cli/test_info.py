"""``outrider info``: a table for people, JSON for programs; and the command by other names."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import metadata

import outrider
from click.testing import Result
from outrider.runtime.cli.info import table
from outrider.runtime.cli.main import app
from outrider.v1 import inference_pb2 as wire
from typer.testing import CliRunner

from tests.runtime.conftest import Start


async def run(address: str, *arguments: str) -> Result:
    command = ["info", "--address", address, *arguments]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_the_table_says_what_is_served(start: Start) -> None:
    async with start() as running:
        result = await run(running.address)
    assert result.exit_code == 0, result.output
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert rows["model"] == "letters" and rows["context"] == "4200 tokens"
    assert "0 running of 4, 0 queued" in result.stdout
    assert len(rows) == len(result.stdout.splitlines()) <= 15


async def test_json_has_every_field(start: Start) -> None:
    async with start() as running:
        result = await run(running.address, "--json")
    found = json.loads(result.stdout)
    assert found["model"] == "letters" and found["limits"]["max_context"] == 4200
    # Of messages without presence all are there, at their zero values too.
    names = {field.name for field in wire.Limits.DESCRIPTOR.fields}
    assert set(found["limits"]) == names
    assert found["certificate"] == {}


def test_the_module_is_the_command_and_has_a_version() -> None:
    assert outrider.__version__ == metadata.version("outrider")
    asked = subprocess.run(
        [sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True
    )
    assert asked.stdout == f"outrider {metadata.version('outrider-server')}\n"


def test_the_table_says_what_texts_take() -> None:
    limits = wire.Limits(cache_bytes_per_token=1 << 20)
    rows = list(table(wire.GetServerInfoResponse(limits=limits)))
    assert f"{'caches':<22} 1000.0 MiB for 1,000 tokens" in rows


def test_a_verdict_on_each_drafter_ends_the_table() -> None:
    found = wire.GetServerInfoResponse()
    known = {"model": {"alpha": 0.31, "least_alpha": 0.45}, "suffix": {"least_alpha": 0.1}}
    for drafter, fields in known.items():
        found.speculation.control.verdicts.add(drafter=drafter, num_rows=8, **fields)
    assert [line.split(None, 1) for line in table(found)][-2:] == [
        [
            "verdict",
            "model loses here: alpha 0.31, would need 0.45; off unless gamma is fixed, 8 at a time",
        ],
        ["verdict", "suffix pays from alpha 0.10 on, 8 at a time"],
    ]


def test_what_exporting_again_would_bring_ends_the_table() -> None:
    found = wire.GetServerInfoResponse(gained_by_export=["half of the launches on CUDA"])
    assert [*table(found)][-1] == "exporting again brings half of the launches on CUDA"


def test_the_table_says_of_a_text_part_what_it_is_of() -> None:
    certificate = json.dumps({"target": {"text_part_of": "gemma3"}})
    found = wire.GetServerInfoResponse(model="own", certificate_json=certificate)
    rows = [line.split(None, 1) for line in table(found)]
    assert ["model", "own, the text part of gemma3: images are refused"] in rows
