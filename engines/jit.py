"""Compiles loops with numba when they are first imported on a machine; later they come from its cache.

Without a folder to keep them in they are compiled at every start. Kept code that cannot be read, as after a copy that
was cut short, is compiled anew. What a compiled function calls is compiled into it, but numba's cache looks at the
function's own file alone; here it also looks at the compiled files whose functions are called.
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
    """Say whether compiled code can be kept; numba refuses to cache where it may write nowhere."""
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


# By name of a module with compiled functions: its file and those it calls, as they are.
_STAMPS: dict[str, tuple[object, ...]] = {}


class _Cache(FunctionCache):  # type: ignore[misc]
    """Keeps a function's code until its own file or one whose compiled functions it calls is another."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        values = function.__globals__.values()
        used = {
            getattr(value, "__module__", None) or getattr(value, "__name__", None)
            for value in values
        }
        called = {name: _STAMPS[name] for name in _STAMPS.keys() & used - {function.__module__}}
        self._called = tuple(sorted(called.items()))
        _STAMPS[function.__module__] = (self._impl.locator.get_source_stamp(), self._called)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(signature, codegen), self._called)


def _compiled(signatures: tuple[object, ...], math: object) -> Callable[[F], F]:
    def compile_with(is_cached: bool) -> Callable[[F], F]:
        def compiled(function: F) -> F:
            dispatcher: Any = numba.njit(fastmath=math, error_model="numpy")(function)
            if is_cached:
                dispatcher._cache = _Cache(function)
            for signature in signatures:
                dispatcher.compile(signature)
            dispatcher.disable_compile()
            kept: F = dispatcher
            return kept

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
    """Drop what is kept of a function; True if code of it can be kept again."""
    try:
        FunctionCache(function).flush()
    except OSError as error:
        logger.warning("it stays there, and is compiled at every start: %s", error)
        return False
    return True
