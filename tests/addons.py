"""For tests that need an add-on without importing it: where its folder was deleted they are skipped."""

from importlib import import_module
from importlib.util import find_spec

import pytest

needs_accelerators = pytest.mark.skipif(
    find_spec("outrider.engines.accelerators") is None, reason="there is no add-on for accelerators"
)


def sample_on_host(patch: pytest.MonkeyPatch) -> None:
    """Let pairs on the CPU sample by the device's kernels where the device is asked for."""
    import_module("tests.emulation.kernels.host").sample_on_host(patch)
