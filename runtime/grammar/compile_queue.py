"""Grammars of requests on their way to be tried: one at a time, off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from outrider.runtime.core.errors import Overloaded
from outrider.runtime.core.params import GrammarParams
from outrider.runtime.grammar.compile import GrammarCompiler

MOST_WAITING = 32
"""Grammars that may wait, those that were tried before among them: half a minute where each takes a whole second."""


class GrammarCompileQueue:
    """Has grammars tried in turn; used on the event loop alone.

    Args:
        compiler: tries them; None where no request may have one.
        retry_after_s: seconds a refused caller is told to wait.
    """

    def __init__(self, compiler: GrammarCompiler | None, retry_after_s: float) -> None:
        self._compiler = compiler
        self._retry_after_s = retry_after_s
        # Its thread begins with the first grammar.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-grammars")
        self._num_waiting = 0

    async def prepare(self, params: GrammarParams) -> None:
        """Return once requests of this grammar can be served; a caller that is cancelled leaves its place.

        Raises:
            RequestError: it cannot be used; names its field.
            Overloaded: too many wait.
        """
        assert self._compiler is not None, "refused where no constraints are served"
        if self._num_waiting >= MOST_WAITING:
            raise Overloaded(self._retry_after_s)
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._compiler.prepare, params)
        finally:
            self._num_waiting -= 1
