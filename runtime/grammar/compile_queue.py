"""Grammars of requests on their way to be tried: one at a time, by turns of tenants, off the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from outrider.runtime.core.errors import Overloaded
from outrider.runtime.core.params import GrammarParams
from outrider.runtime.grammar.compile import GrammarCompiler

MOST_WAITING = 32
"""Grammars that may wait: half a minute where each takes a whole second."""
MOST_OF_TENANT = MOST_WAITING // 4
"""Of these, while others wait."""


class _Job(NamedTuple):
    params: GrammarParams
    answer: asyncio.Future[None]


class GrammarCompileQueue:
    """Has grammars tried by turns of their scopes, which are tenants; used on the event loop alone.

    Args:
        compiler: tries them; None where no request may have one.
        retry_after_s: seconds a refused caller is told to wait.
    """

    def __init__(self, compiler: GrammarCompiler | None, retry_after_s: float) -> None:
        self._compiler = compiler
        self._retry_after_s = retry_after_s
        # Its thread begins with the first grammar.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-grammars")
        # By tenant, the one whose turn is next first.
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._is_busy = False

    async def prepare(self, params: GrammarParams) -> None:
        """Return once requests of this grammar can be served, at once where it is known; a caller may be cancelled.

        Raises:
            RequestError: it cannot be used; names its field.
            Overloaded: too many wait.
        """
        assert self._compiler is not None, "refused where no constraints are served"
        if self._compiler.is_ready(params):
            return
        self._make_room(params.scope)
        job = _Job(params, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(params.scope, deque()).append(job)
        self._start_next()
        try:
            await job.answer
        finally:
            jobs = self._waiting.get(params.scope)
            if jobs and job in jobs:
                jobs.remove(job)
                self._forget_idle(params.scope)

    def _make_room(self, tenant: str) -> None:
        """Refuse one grammar too many: this one, or the last of a tenant that then still has as many."""
        if sum(map(len, self._waiting.values())) < MOST_WAITING:
            return
        most = max(self._waiting, key=lambda name: len(self._waiting[name]))
        num_own = len(self._waiting.get(tenant, ()))
        if num_own >= MOST_OF_TENANT or len(self._waiting[most]) <= num_own + 1:
            raise Overloaded(self._retry_after_s)
        last = self._waiting[most].pop()
        if not last.answer.done():
            last.answer.set_exception(Overloaded(self._retry_after_s))

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        assert self._compiler is not None
        tenant = next(iter(self._waiting))
        job = self._waiting[tenant].popleft()
        self._is_busy = True
        self._waiting.move_to_end(tenant)
        self._forget_idle(tenant)
        loop = asyncio.get_running_loop()
        tried = loop.run_in_executor(self._thread, self._compiler.prepare, job.params)
        tried.add_done_callback(partial(self._finish, job))

    def _finish(self, job: _Job, tried: asyncio.Future[None]) -> None:
        self._is_busy = False
        error = tried.exception()
        if not job.answer.done():
            if error is None:
                job.answer.set_result(None)
            else:
                job.answer.set_exception(error)
        self._start_next()

    def _forget_idle(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
