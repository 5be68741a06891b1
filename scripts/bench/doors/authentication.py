"""What authentication costs: processor time of the check alone, and per call of a server beside an open one."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from outrider import Client
from outrider.runtime.core.errors import Unauthenticated
from outrider.runtime.serving.doors.authenticator import Presented
from outrider.runtime.serving.doors.doors import Doors
from outrider.runtime.serving.doors.options import DoorOptions

from scripts.bench.costs.isolation import processor_s
from scripts.bench.doors.papers import URI, Papers
from scripts.bench.tools.results import Row
from scripts.soak.server import running_server

BOUND_MS = 0.1
"""Of a processor, per request."""
# What each kind is compared with: the same transport, without authentication.
BESIDE = {"open": "open", "key": "open", "jwt": "open", "tls": "tls", "mtls": "tls"}
_AT_ONCE = 16
_READY_S = 120.0


def checks(papers: Papers, num_calls: int) -> list[Row]:
    """Return the processor time of the check by itself, in this process, for callers who are known and who are not."""
    shown = {
        "key": Presented(authorization=f"Bearer {papers.key}"),
        "jwt": Presented(authorization=f"Bearer {papers.token}"),
        "mtls": Presented(certificate_names=(URI,)),
        "wrong key": Presented(authorization=f"Bearer {papers.key[::-1]}"),
        "no key": Presented(),
    }
    rows = []
    for kind, presented in shown.items():
        found = "key" if kind.endswith(" key") else kind
        identify = Doors(DoorOptions(**papers.doors(found))).authenticator.identify
        with suppress(Unauthenticated):
            identify(presented)  # what is imported or computed once
        began_s, num_known = time.process_time(), 0
        for _ in range(num_calls):
            try:
                num_known += bool(identify(presented).tenant)
            except Unauthenticated:
                continue
        spent_ms = (time.process_time() - began_s) / num_calls * 1e3
        case = {"figure": "authentication, the check alone", "kind": kind}
        rows.append(Row(case=case, figures={"ms_per_request": spent_ms, "let_in": num_known}))
    return rows


def servers(bundle: Path, papers: Papers, num_calls: int, rounds: int) -> list[Row]:
    """Return the processor time of a server per call of GetServerInfo, the kinds of doors in turns."""
    spent: dict[str, list[float]] = {kind: [] for kind in BESIDE}
    for _ in range(rounds):
        for kind in spent:
            spent[kind].append(_per_call_ms(bundle, papers, kind, num_calls))
    found = {kind: statistics.median(values) for kind, values in spent.items()}
    return [
        Row(
            case={"figure": "authentication, a whole server", "kind": kind},
            figures={
                "ms_per_request": found[kind],
                "added_ms": found[kind] - found[beside],
                "calls": num_calls * rounds,
            },
        )
        for kind, beside in BESIDE.items()
    ]


def _per_call_ms(bundle: Path, papers: Papers, kind: str, num_calls: int) -> float:
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_server(bundle, "--gamma", "0", "--costs", scratch, *papers.options(kind)) as server,
    ):

        async def ask(client: Client, count: int) -> None:
            for _ in range(count):
                await client.info()

        async def ask_all() -> float:
            async with Client(server.address, **papers.access(kind)) as client:
                await client.wait_ready(timeout_s=_READY_S)
                await ask(client, _AT_ONCE)
                began_s = processor_s(server.pid)
                each = -(-num_calls // _AT_ONCE)
                await asyncio.gather(*(ask(client, each) for _ in range(_AT_ONCE)))
                return (processor_s(server.pid) - began_s) / (each * _AT_ONCE) * 1e3

        return asyncio.run(ask_all())
