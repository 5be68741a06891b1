"""Ports for servers that must have the same one twice."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on at the moment."""
    opened = [socket.socket() for _ in range(count)]
    for one in opened:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports
