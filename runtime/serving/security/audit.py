"""The audit log: a file with one line of JSON for each request that was admitted or refused, and never a text of one.

Lines are appended whole. When somebody moves or removes the file, as logrotate does, the next line begins a new one.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from outrider.runtime.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One request.

    Attributes:
        method: as gRPC names it.
        outcome: "admitted", written once it has ended, or "refused".
        tenant: whose request it is; empty where that is not known.
        key: what proved it, as of ``Identity``.
        peer: address of the caller, without the port.
        not_written: entries before it that were left out: refusals of strangers beyond those that a second has lines
            of, and what a disk was too slow for.
        request_id: the caller's name for it.
        code: gRPC status that it ended with.
        reason: of the error, or of the end of the answer.
        prompt_tokens: of the prompt, once it is known.
        output_tokens: that were emitted, of all completions.
        ms: from its arrival to its end.
    """

    method: str
    outcome: str
    tenant: str = ""
    key: str = ""
    peer: str = ""
    request_id: str = ""
    code: str
    reason: str
    priority: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ms: float = 0.0
    not_written: int = 0


MOST_WAITING = 100_000
"""Entries that wait for a slow disk: 40 MiB."""


class AuditLog:
    """Appends entries to a file that only its owner may read, on a thread of its own.

    Args:
        path: of the file; made where there is none.
        now: returns the time of day in UTC.

    Raises:
        ConfigError: nothing can be appended to the file.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._path = path
        self._now = now
        self._has_failed = False
        self._lock = threading.Lock()
        # Guarded by the lock: entries that wait, and those that were given up since the last that was taken.
        self._num_waiting = self._num_lost = 0
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError("audit_log", "must be a file that can be appended to") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-audit")

    def write(self, entry: AuditEntry) -> None:
        """Have an entry appended. Where that fails, requests go on, and the server's log says so once."""
        with self._lock:
            is_full = self._num_waiting >= MOST_WAITING
            self._num_lost += is_full
            self._num_waiting += not is_full
            num_lost, self._num_lost = self._num_lost, self._num_lost if is_full else 0
        if is_full:
            self._note_failure("its disk is too slow")
            return
        entry = replace(entry, not_written=entry.not_written + num_lost)
        time = self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": time, **asdict(entry)}, separators=(",", ":")).encode() + b"\n"
        self._thread.submit(self._append, line)

    def flush(self) -> None:
        """Return once all entries so far are written."""
        self._thread.submit(lambda: None).result()

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._num_waiting -= 1
            is_last = not self._num_waiting
        try:
            if self._has_moved():
                moved, self._file = self._file, self._open()
                os.close(moved)
            os.write(self._file, line)
            self._has_failed &= not is_last
        except OSError as error:
            self._note_failure(error.strerror)

    def _note_failure(self, reason: str | None) -> None:
        if not self._has_failed:
            log.error("the audit log cannot be written: %s", reason)
        self._has_failed = True

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._thread.shutdown()
        os.close(self._file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o600)

    def _has_moved(self) -> bool:
        """Return whether the path is no longer that of the open file."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return True


def host_of(peer: str) -> str:
    """Return a caller's address without its port.

    Args:
        peer: as gRPC spells it, "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000" or "unix:PATH".
    """
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return scheme
    return rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
