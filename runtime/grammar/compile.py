"""Grammars are tried where they can do no harm before they reach the server's own process.

The other side is ``runtime.grammar.child``. What was found out about a grammar is kept: the next request with it asks
nobody.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import subprocess
import sys
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from threading import Lock

from outrider.runtime.core.errors import InternalError, RequestError
from outrider.runtime.core.params import GrammarKind, GrammarParams
from outrider.runtime.grammar.base import Constraints

LIMIT_S = 2.0
LIMIT_BYTES = 256 << 20
MOST_NESTED = 32
"""Levels of a schema."""
MOST_TOLD = 256
"""Grammars whose fate is kept."""
OPEN_S = 60.0
"""Seconds that the process may take to load a tokenizer: 2 for one of 150,000 tokens."""
GRACE_S = 20.0
"""Seconds beyond the limit in which an answer comes, also from a busy machine."""

log = logging.getLogger(__name__)


class GrammarCompiler:
    """Tries grammars in a process of its own, which is started with the first; callable from any thread.

    Args:
        tokenizer: bytes of the ``tokenizer.json`` of what the model writes.
        vocab_size: V of the target.
        end_ids: tokens that end an answer.
        constraints: those of this process, which then have the grammar compiled too; None where a worker elsewhere has
            them.
        limit_s: seconds of a processor that one grammar may take.
        limit_bytes: that it may take beside the tokenizer.
    """

    def __init__(
        self,
        tokenizer: bytes,
        vocab_size: int,
        end_ids: Sequence[int],
        *,
        constraints: Constraints | None = None,
        limit_s: float = LIMIT_S,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._opening = {
            "tokenizer": tokenizer.decode(),
            "vocab_size": vocab_size,
            "end_ids": list(end_ids),
        }
        self._constraints = constraints
        self._limits = {"limit_s": limit_s, "limit_bytes": limit_bytes}
        self._answer_s = limit_s + GRACE_S
        # By digest: the grammar of a caller's tools may have some hundred KiB.
        self._told: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()
        self._child: _Child | None = None

    def is_ready(self, params: GrammarParams) -> bool:
        """Return whether ``prepare`` has nothing to try; at once.

        Raises:
            RequestError: it is known that it cannot be used; names its field.
        """
        rule = self._told.get(_digest(params))
        if rule:
            raise RequestError(params.name, rule)
        return rule == "" and (self._constraints is None or self._constraints.is_kept(params))

    def prepare(self, params: GrammarParams) -> None:
        """Return once requests of this grammar can be served; takes seconds where it is new.

        Raises:
            RequestError: it cannot be used; names its field.
            InternalError: the process that tries grammars cannot be had.
        """
        with self._lock:
            known = _digest(params)
            rule = self._told.get(known)
            if rule is None:
                rule = self._told[known] = _nested(params) or self._try(params)
                if len(self._told) > MOST_TOLD:
                    self._told.popitem(last=False)
            self._told.move_to_end(known)
        if rule:
            raise RequestError(params.name, rule)
        if self._constraints is not None:
            self._constraints.constraint(params)

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        with self._lock:
            self._end()

    def _try(self, params: GrammarParams) -> str:
        """Return why a grammar cannot be used; empty where it can."""
        asked = {
            "kind": params.kind,
            "text": params.text,
            "allows_whitespace": params.allows_whitespace,
            "made_of": params.field,
            **self._limits,
        }
        try:
            self._child = self._child or _Child(self._opening)
            return self._child.ask(asked, self._answer_s)
        except (OSError, EOFError, ValueError) as error:
            self._end()
            error_id = uuid.uuid4().hex[:16]
            log.exception("grammars cannot be tried; error id %s", error_id)
            raise InternalError(error_id) from error

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """The process, with its tokenizer loaded."""

    def __init__(self, opening: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", "-m", "outrider.runtime.grammar.child")
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        # Also where nobody calls ``end``.
        self.end = weakref.finalize(self, _end, process, self._connection)
        if refusal := self.ask(opening, OPEN_S):
            raise ValueError(refusal)

    def ask(self, message: object, limit_s: float) -> str:
        """Return the answer to a message.

        Raises:
            OSError: none came in time, or the process has ended.
        """
        self._connection.send_bytes(json.dumps(message).encode())
        if not self._connection.poll(limit_s):
            raise TimeoutError(f"no answer in {limit_s} s")
        return self._connection.recv_bytes().decode()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def _digest(params: GrammarParams) -> bytes:
    return hashlib.sha256(repr(params).encode()).digest()


def _nested(params: GrammarParams) -> str:
    """Return a rule that a schema breaks before anybody compiles it; empty where it breaks none."""
    if params.kind is not GrammarKind.JSON_SCHEMA:
        return ""
    rule = f"must be nested at most {MOST_NESTED} deep"
    try:
        level: list[object] = [json.loads(params.text)]
    except RecursionError:
        return rule
    except ValueError:
        return "must be JSON"
    for _ in range(MOST_NESTED + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return ""
    return rule
