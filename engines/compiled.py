"""How loops are compiled: by numba, when first imported on a machine, and from its cache after that.

At every start where there is no folder to keep one in. What a compiled function calls is compiled into it, but numba's
cache looks at the function's own file alone: functions that call each other belong into one file, unless what is called
is fixed for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

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


def kernel(*signatures: object) -> Callable[[F], F]:
    """Compile a loop over a row for these signatures; its sums run in an order of the compiler's choice."""
    return _compiled(signatures, _MATH)


def rule(*signatures: object) -> Callable[[F], F]:
    """Compile a decision for these signatures; its arithmetic is Python's, bit for bit."""
    return _compiled(signatures, False)


def _compiled(signatures: tuple[object, ...], math: object) -> Callable[[F], F]:
    compiled: Callable[[F], F] = numba.njit(
        list(signatures), cache=_CAN_CACHE, fastmath=math, error_model="numpy"
    )
    return compiled
