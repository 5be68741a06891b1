"""Which of many like parameters the gate runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(names: Iterable[str], *few: str) -> list[Any]:
    """Return names as parameters of a test: a few run always, and the others with ``--long``."""
    known = list(names)
    assert set(few) <= set(known), f"{set(few) - set(known)} are none of {known}"
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in known]
