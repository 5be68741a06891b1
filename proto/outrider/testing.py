"""Holds an export against its checkpoint in a test suite: a plugin for pytest.

``pytest_plugins = ["outrider.testing"]`` in ``conftest.py`` gives the fixture ``assert_parity``; the function may also
be imported. It needs the distribution ``outrider-server`` with the extras ``cpu`` and ``export``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.absent import import_of_server


def assert_parity(
    bundle: str | Path,
    checkpoint: str | Path,
    *,
    draft_checkpoint: str | Path | None = None,
    device: str = "cpu",
) -> None:
    """Assert that a bundle answers as its checkpoint does in PyTorch.

    Its graphs are compared as ``outrider parity`` does, and then logits of the engine that would serve it. Float32 is
    to be within 1e-4 (with an encoder, in proportion where logits are above 10). Graphs of other weights may be half as
    far again as when the bundle was made, and an engine half as far again as its graphs, both plus 1e-4.

    Args:
        bundle: folder of the export.
        checkpoint: folder of the target that it was made from.
        draft_checkpoint: of its draft, likewise; None compares the target alone.
        device: of the engine: "cpu", "cuda[:N]", "tensorrt[:N]" or "auto".

    Raises:
        AssertionError: it does not; names the graph and the case.
        ImportError: the server's distribution, or an extra of it, is not installed.
    """
    __tracebackhide__ = True
    check = import_of_server(
        "outrider.export.certificate.engine_parity", "check_bundle", extra="cpu,export"
    )
    refused = import_of_server("outrider.engines.base", "BundleError", extra="cpu,export")
    checkpoints = {"target": Path(checkpoint)}
    if draft_checkpoint is not None:
        checkpoints["draft"] = Path(draft_checkpoint)
    try:
        check(Path(bundle), checkpoints, device=device)
    except refused as error:
        raise AssertionError(str(error)) from error


@pytest.fixture(scope="session", name="assert_parity")
def assert_parity_fixture() -> Callable[..., Any]:
    """Return ``assert_parity``."""
    return assert_parity
