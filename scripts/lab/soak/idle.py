"""Idle clients: 2,000 that were let in, and 600 strangers who say nothing; who loses a place, and what they cost.

python -m scripts.lab.soak.idle BUNDLE
"""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path

import grpc
import psutil
import typer
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.server import ServerProcess, running_server
from scripts.lab.soak.verdict import finish, resident_mib

INFO = "/outrider.v1.Inference/GetServerInfo"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# Each channel has a connection of its own.
OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
PATIENCE_S = 10.0


async def strangers(address: str, num: int) -> list[asyncio.StreamReader]:
    """Return connections that have greeted and say nothing more."""
    host, port = address.rsplit(":", 1)
    pairs = []
    for _ in range(num):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(GREETING)
        pairs.append((reader, writer))
    _KEPT.extend(pairs)
    return [reader for reader, _ in pairs]


_KEPT: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the server has closed a connection."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


async def measure(server: ServerProcess, num_clients: int, num_strangers: int) -> dict[str, object]:
    """Return memory, places kept, and how soon a new caller is answered."""
    before = resident_mib(server.pid)
    channels = [grpc.aio.insecure_channel(server.address, options=OWN) for _ in range(num_clients)]
    ask = wire.GetServerInfoRequest().SerializeToString()
    for first in range(0, num_clients, 50):
        await asyncio.gather(*(one.unary_unary(INFO)(ask) for one in channels[first : first + 50]))
    full = resident_mib(server.pid)
    num_held = sum(
        one.status == psutil.CONN_ESTABLISHED
        for one in psutil.Process(server.pid).net_connections("tcp")
    )
    idle = await strangers(server.address, num_strangers)
    began_s = time.monotonic()
    async with grpc.aio.insecure_channel(server.address, options=OWN) as late:
        await late.unary_unary(INFO)(ask, wait_for_ready=True, timeout=PATIENCE_S)
    answered_s = time.monotonic() - began_s
    num_closed = sum(await asyncio.gather(*map(is_closed, idle)))
    num_lost = sum(one.get_state() is not grpc.ChannelConnectivity.READY for one in channels)
    return {
        "connections held": num_held,
        "MiB before": round(before, 1),
        "MiB with the clients": round(full, 1),
        "KiB per client": round((full - before) * 1024 / num_clients, 1),
        "clients that lost their place": num_lost,
        "strangers closed": num_closed,
        "seconds until a new caller was answered": round(answered_s, 3),
    }


def main(bundle: Path, clients: int = 2000, idlers: int = 600) -> None:
    """Print the figures, and exit 1 where a client lost its place or strangers kept more than a 32nd of 4,096."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with running_server(bundle, "--port", "0") as server:
        figures = asyncio.run(measure(server, clients, idlers))
    problems = []
    if figures["clients that lost their place"]:
        problems.append("clients that were let in lost their places")
    if idlers - int(str(figures["strangers closed"])) > 4096 // 32:
        problems.append("strangers of one address kept more than their share")
    finish("idle", figures, problems)


if __name__ == "__main__":
    typer.run(main)
