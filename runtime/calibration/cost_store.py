"""Where cost tables are kept: by models, hardware and version, so that each is measured once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from outrider.runtime.gamma.costs import CostTable

SCHEMA = 6

log = logging.getLogger(__name__)


def load_or_measure(
    paths: Sequence[Path], measure: Callable[[], CostTable], *, is_refreshed: bool = False
) -> CostTable:
    """The table kept at the first of the paths that has one, or a measured one, which is kept.

    A kept table whose measurements disagreed is measured again, and the better of the two is taken.

    Args:
        paths: where it may lie, in order of preference; the first that can be written keeps it.
        measure: takes seconds.
        is_refreshed: measure even if there is one.
    """
    kept = None if is_refreshed else _kept(paths)
    if kept is not None and kept.is_settled:
        return kept
    table = measure()
    if kept is not None and kept.disagreement < table.disagreement:
        table = kept
    if not table.is_settled:
        log.warning(
            "measurements of what steps cost disagree by %.0f %%: something else uses this machine; "
            "served steps will correct them, and the next start measures again",
            100.0 * table.disagreement,
        )
    _keep(paths, table)
    return table


def _kept(paths: Sequence[Path]) -> CostTable | None:
    for path in paths:
        try:
            return CostTable.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("the cost table %s cannot be used: %s", path, error)
    return None


def _keep(paths: Sequence[Path], table: CostTable) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
            unfinished.write_text(table.to_json() + "\n", encoding="utf-8")
            unfinished.replace(path)
            return
        except OSError as error:
            log.info("the cost table cannot be kept in %s: %s", path.parent, error)


def table_name(*, files: Sequence[str], device: str, num_threads: int, max_batch: int) -> str:
    """File name of the table of these models on this machine.

    Args:
        files: digests of everything the engines run.
        device: "cpu" or "cuda".
        num_threads: of a CPU backend.
        max_batch: slots.
    """
    facts = {
        "schema": SCHEMA,
        "files": sorted(files),
        "device": device,
        "num_threads": num_threads,
        "max_batch": max_batch,
        "hardware": _hardware(),
        "versions": [_version("outrider-server"), _version("onnxruntime")],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{digest[:16]}.json"


def _hardware() -> list[str]:
    processor = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return [platform.machine(), processor, str(os.cpu_count())]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
