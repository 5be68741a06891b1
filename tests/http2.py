"""Raw HTTP/2 as hostile clients send it: connections that stall, and headers without end."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, CONTINUATION = 4, 1, 9
END_HEADERS = 0x4
FRAME = 16_384
"""Bytes of a frame at most, where a peer allows no more (RFC 9113, section 4.2)."""


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return one frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value: int, prefix_bits: int, pattern: int) -> bytes:
    """Return an integer behind the pattern of its first byte (RFC 7541, section 5.1)."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((pattern | value,))
    rest, out = value - most, [pattern | most]
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes((*out, rest))


def field(name: bytes, value: bytes, *, is_indexed: bool = False) -> bytes:
    """Return a header field as a literal, kept in the peer's table or not (RFC 7541, section 6.2)."""
    texts = b"".join(integer(len(text), 7, 0) + text for text in (name, value))
    return (b"\x40" if is_indexed else b"\x00") + texts


def opening_fields(path: bytes) -> bytes:
    """Return the fields that every call begins with."""
    pairs = (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"soak"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    )  # fmt: skip
    return b"".join(field(name, value) for name, value in pairs)


def long_headers(path: bytes, num_bytes: int) -> bytes:
    """Return frames of a call whose headers have ``num_bytes`` in values of a KiB, and no end."""
    block = opening_fields(path) + field(b"x-soak", b"x" * 1024) * (num_bytes // 1024)
    return split_headers(block, has_end=False)


def repeated_headers(path: bytes, num_bytes: int) -> bytes:
    """Return frames of a call whose headers have ``num_bytes`` when unpacked, of a byte per 3 KiB on the wire."""
    entry = field(b"x-soak", b"x" * 3000, is_indexed=True)
    # 62 is the newest entry of the peer's table (RFC 7541, section 2.3.3).
    return split_headers(opening_fields(path) + entry + b"\xbe" * (num_bytes // 3000), has_end=True)


def split_headers(block: bytes, *, has_end: bool, stream: int = 1) -> bytes:
    """Return the frames of a header block."""
    parts = [block[at : at + FRAME] for at in range(0, len(block), FRAME)]
    last = len(parts) - 1
    return b"".join(
        frame(
            CONTINUATION if index else HEADERS,
            part,
            flags=END_HEADERS if has_end and index == last else 0,
            stream=stream,
        )
        for index, part in enumerate(parts)
    )


@dataclass(slots=True)
class RawConnection:
    """A connection of a client that speaks HTTP/2 by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def is_closed_by_server(self, timeout_s: float) -> bool:
        """Return whether the server ends the connection in time; what it sends meanwhile is read."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        self.close()
        return True

    def close(self) -> None:
        """Drop the connection without a farewell."""
        self.writer.transport.abort()


async def connect(address: str, first: bytes = b"") -> RawConnection | None:
    """Return a connection on which ``first`` was sent; None where the server took it away at once."""
    host, port = address.rsplit(":", 1)
    try:
        connection = RawConnection(*await asyncio.open_connection(host, int(port)))
    except OSError:
        return None
    try:
        connection.writer.write(first)
        await connection.writer.drain()
    except OSError:
        connection.close()
        return None
    return connection
