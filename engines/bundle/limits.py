"""Limits of a manifest, held against one another and against the graphs, before anybody allocates by them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.files import MANIFEST_FILE
from outrider.engines.bundle.onnx_files import table_lengths

# Positions and token ids are 32 bits wide in compiled loops; rows are counted in arrays made at the start.
MOST_TOKENS = 1 << 30
MOST_ROWS = 1 << 16
MOST_SIZE = 1 << 24
# Names of tables by position end so (``export.graph.position_tables``).
TABLE_SUFFIX = ".by_position"


def check_limits(limits: Iterable[tuple[str, int, int]]) -> None:
    """Refuse a limit that is above what it may be.

    Args:
        limits: name, value and most of each.

    Raises:
        BundleError: naming the field.
    """
    for name, value, most in limits:
        if value > most:
            raise BundleError(f"{MANIFEST_FILE}: field {name!r} must be at most {most}")


def check_tables(path: Path, graph: str, limit: tuple[str, int]) -> None:
    """Refuse a graph whose tables by position end before the last token that a slot may hold.

    Args:
        path: the graph's file.
        graph: how errors call it.
        limit: name and value of what the manifest says of the tokens that the graph is given.

    Raises:
        BundleError: naming the graph and the limit.
    """
    for name, length in table_lengths(path, TABLE_SUFFIX).items():
        if length < limit[1]:
            raise BundleError(
                f"{graph}: {name} has {length} positions, but {limit[0]} is {limit[1]}"
            )
