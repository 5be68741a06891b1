"""PyTorch's logits in float64, of any model: what its float32 rounds away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Rows of a weight that are widened at once: a head's table would be 1.9 GB in float64.
_MOST_ROWS = 1 << 14
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


class Doubles(TorchFunctionMode):  # type: ignore[misc]
    """Inside, every operation is given float64 for what has fewer bits, and whoever asks for fewer gets float64.

    So a model of any type computes in float64, its norms and angles too, which cast to float32 by themselves. Weights
    are widened one at a time, as an operation wants them; rows of an embedding once they are read.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "__get__":  # attributes
            return func(*args, **(kwargs or {}))
        if func in _CASTS:
            func = Tensor.double
        if name == "linear" and len(args[1]) > _MOST_ROWS and args[2:] in ((), (None,)):
            left = _widened(args[0])
            return torch.cat([func(left, one.double()) for one in args[1].split(_MOST_ROWS)], -1)
        changes_first = (
            name == "__setitem__"
            or name.startswith("__i")
            or (name.endswith("_") and not name.endswith("__"))
        )
        kept = 1 if changes_first else len(args) if name == "embedding" else 0
        given = [*args[:kept], *map(_widened, args[kept:])]
        found = func(*given, **{key: _widened(value) for key, value in (kwargs or {}).items()})
        return found if changes_first else _widened(found)


def _widened(value: Any) -> Any:
    """Return float64 for tensors and types of fewer bits, inside of sequences too."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value
