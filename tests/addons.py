"""Marks for tests that need an add-on without importing it: where its folder was deleted they are skipped."""

from importlib.util import find_spec

import pytest

needs_accelerators = pytest.mark.skipif(
    find_spec("outrider.engines.accelerators") is None, reason="there is no add-on for accelerators"
)
