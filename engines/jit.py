"""How loops are compiled: by numba, when first imported on a machine, and from its cache after that.

At every start where there is no folder to keep one in; anew where what was kept cannot be read, as after a copy that
was cut short. What a compiled function calls is compiled into it, but numba's cache looks at the function's own file
alone: functions that call each other belong into one file, unless what is called is fixed for ever.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

# Sums may be reordered and products fused; NaN and infinity keep their meaning.
_MATH = {"reassoc", "contract", "nsz"}


def _can_cache() -> bool:
    """Whether compiled code can be kept; numba refuses to cache where it may write nowhere."""
    try:
        numba.njit(cache=True)(_can_cache)
    except RuntimeError as error:
        logger.warning(
            "kernels are compiled at every start; name a folder in NUMBA_CACHE_DIR: %s", error
        )
        return False
    return True


_CAN_CACHE = _can_cache()


def njit_fastmath(*signatures: object) -> Callable[[F], F]:
    """Compile a loop over a row for these signatures; its sums run in an order of the compiler's choice."""
    return _compiled(signatures, _MATH)


def njit_exact(*signatures: object) -> Callable[[F], F]:
    """Compile a decision for these signatures; its arithmetic is Python's, bit for bit."""
    return _compiled(signatures, False)


def _compiled(signatures: tuple[object, ...], math: object) -> Callable[[F], F]:
    def compile_with(is_cached: bool) -> Callable[[F], F]:
        compiled: Callable[[F], F] = numba.njit(
            list(signatures), cache=is_cached, fastmath=math, error_model="numpy"
        )
        return compiled

    def compile_or_load(function: F) -> F:
        try:
            return compile_with(_CAN_CACHE)(function)
        except Exception as error:  # a damaged file may raise anything when it is unpickled
            if not _CAN_CACHE:
                raise
            name = function.__qualname__
            logger.warning("what was kept of %s cannot be used, so it is compiled: %r", name, error)
            return compile_with(_forget(function))(function)

    return compile_or_load


class _FirstCompile(numba.core.event.Listener):  # type: ignore[misc]
    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def on_start(self, event: object) -> None:
        begin, self._begin = self._begin, lambda: None
        begin()

    def on_end(self, event: object) -> None:
        pass


def watch_compiling(begin: Callable[[], None]) -> contextlib.AbstractContextManager[object]:
    """Call ``begin`` when the first function is compiled within the block; one from the cache does not count."""
    watched: contextlib.AbstractContextManager[object] = numba.core.event.install_listener(
        "numba:compile", _FirstCompile(begin)
    )
    return watched


def _forget(function: Callable[..., Any]) -> bool:
    """Drop what is kept of a function; whether anything can be kept of it again."""
    try:
        FunctionCache(function).flush()
    except OSError as error:
        logger.warning("it stays there, and is compiled at every start: %s", error)
        return False
    return True
