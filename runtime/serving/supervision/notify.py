"""Tells systemd how the process is: started, alive, stopping, and what it is at.

A unit of ``Type=notify`` names a socket in the environment; without one nobody asks, and nothing is told.
"""

from __future__ import annotations

import functools
import logging
import os
import socket

READY, ALIVE, STOPPING = "READY=1", "WATCHDOG=1", "STOPPING=1"
SOCKET_VARIABLE = "NOTIFY_SOCKET"

log = logging.getLogger(__name__)


def notify(*words: str, status: str = "") -> None:
    """Send words of sd_notify, and a status for people; never waits, and callable from any thread."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    # Others than a path and an abstract name are for systemd's own virtual machines.
    if not path.startswith(("/", "@")):
        return
    lines = [*words, *([f"STATUS={status}"] if status else [])]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as opened:
            opened.sendto(
                "\n".join(lines).encode(), path.replace("@", "\0", 1) if path[0] == "@" else path
            )
    except OSError as error:
        _warn(path, error.strerror or type(error).__name__)


@functools.cache
def _warn(path: str, reason: str) -> None:
    """Say once of each reason that systemd cannot be told: it would be said twice a second."""
    log.warning("systemd at %s is not told how the server is: %s", path, reason)
