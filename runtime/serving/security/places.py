"""Who keeps a place among a listener's connections: strangers hold few, and leave first.

A *stranger* is a connection on which the gate has let no call in yet. gRPC accepts connections by itself and tells
nobody, so the process's own sockets are looked at a few times a second. A connection that has to go is shut down; its
owner, gRPC or the event loop, closes it as if its client had left. Where the system has no ``/proc``, nothing is done.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote

from outrider.runtime.serving.security.options import Network

EVERY_S = 0.25
"""Seconds between two looks, longer where a look takes more than ``_SHARE`` of them."""
_SHARE = 0.02
LEAST_OF_HOST = 8
"""Connections of strangers that one address may have, however few places there are."""
_FILES = "/proc/self/fd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One connection.

    Attributes:
        peer: the client's address, as gRPC spells it.
        host: without the port.
        is_known: whether a call of it was let in.
        used_s: when a call of it was last in progress; of strangers, when the connection was first seen.
    """

    peer: str
    host: str
    is_known: bool
    used_s: float


def leaving(held: Sequence[Held], most: int) -> list[Held]:
    """Return the connections of a listener that must go, so that a sixteenth of its places is free.

    Strangers have a half of the places, and those of one address a 32nd, eight at least. Beyond, the longest idle go.
    Where there is still no room, strangers go first; then the longest idle of the address that has the most.
    """
    oldest = sorted(held, key=lambda one: one.used_s)
    strangers = [one for one in oldest if not one.is_known]
    gone: list[Held] = []
    num_of = Counter(one.host for one in strangers)
    num_left = len(strangers)
    for one in strangers:
        if num_of[one.host] > max(LEAST_OF_HOST, most // 32) or num_left > max(1, most // 2):
            gone.append(one)
            num_of[one.host] -= 1
            num_left -= 1
    taken = {one.peer for one in gone}
    rest = [one for one in oldest if one.peer not in taken]
    num_too_many = len(rest) - (most - most // 16)
    if num_too_many > 0:
        num_of = Counter(one.host for one in rest)
        rest.sort(key=lambda one: (one.is_known, -num_of[one.host] if one.is_known else 0))
        gone += rest[:num_too_many]
    return gone


class Places:
    """Looks after the connections of listeners.

    Args:
        clock: monotonic seconds.
        proxies: whose connections are many callers': none of them is a stranger's, or shares an address.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, proxies: Sequence[Network] = ()
    ) -> None:
        self._clock, self._proxies = clock, proxies
        self._can_look = os.path.isdir(_FILES)
        # When the gate last let a call in, by peer; of connections that have gone until the next look.
        self._let_in: dict[str, float] = {}
        # Calls that go on, by peer.
        self._num_calls: Counter[str] = Counter()
        self._seen: dict[str, float] = {}
        # Inode, port and peer by file; a file that is no connection of a listener has no port.
        self._files: dict[int, tuple[int, int, str]] = {}

    def let_in(self, peer: str) -> None:
        """Note that the gate has let a call of this peer in."""
        self._let_in[peer] = self._clock()
        self._num_calls[peer] += 1

    def left(self, peer: str) -> None:
        """Note that such a call has ended."""
        self._num_calls[peer] -= 1
        if not self._num_calls[peer]:
            del self._num_calls[peer]
        if peer in self._let_in:  # else the connection has gone before the call
            self._let_in[peer] = self._clock()

    async def watch(self, most: Mapping[int, int], closed: Callable[[int], None]) -> None:
        """Look until cancelled.

        Args:
            most: places by port.
            closed: told how many connections were closed, after each look that closes some.
        """
        while self._can_look:
            began_s = self._clock()
            with suppress(OSError):  # no file left to look with: at the next look there may be one
                if num_closed := await asyncio.to_thread(self.look, most):
                    closed(num_closed)
            await asyncio.sleep(max(EVERY_S, (self._clock() - began_s) / _SHARE))

    def look(self, most: Mapping[int, int]) -> int:
        """Close the connections that must go, and return how many these are."""
        # Before the files: whose call was let in meanwhile has a connection that is not among them yet.
        noted, seen, busy = dict(self._let_in), self._seen, set(self._num_calls)
        now_s, files = self._clock(), self._connections(most)
        peers = {peer: number for number, (_, _, peer) in files.items()}
        self._seen = {peer: seen.get(peer, now_s) for peer in peers}
        for peer in noted.keys() - peers.keys():
            self._let_in.pop(peer, None)
        num_closed = 0
        for port, num_places in most.items():
            held = [
                self._held(peer, peer in noted, now_s if peer in busy else noted.get(peer))
                for _, its_port, peer in files.values()
                if its_port == port
            ]
            for one in leaving(held, num_places):
                num_closed += _shut(peers[one.peer], one.peer)
        return num_closed

    def _held(self, peer: str, is_known: bool, used_s: float | None) -> Held:
        """Return a connection of ``look``; without a time of use it was used when it was first seen."""
        host = peer.rpartition(":")[0]
        if self._proxies and is_within(host, self._proxies):
            host, is_known = peer, True
        used_s = self._seen[peer] if used_s is None else used_s
        return Held(peer=peer, host=host, is_known=is_known, used_s=used_s)

    def _connections(self, ports: Mapping[int, int]) -> dict[int, tuple[int, int, str]]:
        """Return the files of this process that are connections of the ports."""
        found: dict[int, tuple[int, int, str]] = {}
        for name in os.listdir(_FILES):
            number = int(name)
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(number)
                known = self._files.get(number)
                if known is None or known[0] != status.st_ino:
                    port, peer = _ends(number) if stat.S_ISSOCK(status.st_mode) else (0, "")
                    known = (status.st_ino, port, peer)
                found[number] = known
        self._files = found
        return {number: one for number, one in found.items() if one[2] and one[1] in ports}


def is_within(host: str, networks: Sequence[Network]) -> bool:
    """Return whether a host, as ``Held`` has it, belongs to one of the networks."""
    address = ip_address(unquote(host.partition(":")[2]).strip("[]"))
    return any(address in network for network in networks)


def _ends(number: int) -> tuple[int, str]:
    """Return port and peer of a connection; no peer of any other socket."""
    with _own(number) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return 0, ""
        return own.getsockname()[1], _peer(own)


def _own(number: int) -> socket.socket:
    """Return a socket of its own for a file that is one."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _peer(own: socket.socket) -> str:
    host, port = own.getpeername()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _shut(number: int, peer: str) -> bool:
    """End a connection, if the file is still this one."""
    with suppress(OSError), _own(number) as own:
        if _peer(own) == peer:
            own.shutdown(socket.SHUT_RDWR)
            return True
    return False
