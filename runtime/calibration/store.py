"""Keeps cost tables, named by models, hardware and versions, so that each is measured once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.runtime.gamma.costs import CostTable, HostCosts, ModelCosts, RowCosts, RowKind

SCHEMA = 9  # rises with what is measured and how: an older table has another name, and is not found
UNFINISHED = ".new"
NAME_DIGITS = 16
ABANDONED_S = 3600.0
# A new version of these may run at another speed.
PACKAGES = ("outrider-server", "onnxruntime", "onnxruntime-gpu")

log = logging.getLogger(__name__)


def load_or_measure(
    paths: Sequence[Path],
    measure: Callable[[], CostTable],
    *,
    is_refreshed: bool = False,
) -> CostTable:
    """Return the table kept at the first of the paths that has one, else a measured one, which is then kept.

    The first of the paths that can be written keeps the table. ``is_refreshed`` measures even if there is one.
    """
    kept = None if is_refreshed else _kept(paths)
    if kept is not None:
        return kept
    table = measure()
    if not table.is_settled:
        log.warning(
            "measurements of what steps cost disagree by %.0f %%: something else uses this machine; "
            "served steps will correct them, and a start with --refresh-costs measures again",
            100.0 * table.disagreement,
        )
    _keep(paths, table)
    return table


def _kept(paths: Sequence[Path]) -> CostTable | None:
    for path in paths:
        try:
            return table_from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("the cost table %s cannot be used: %s", path, error)
    return None


def _keep(paths: Sequence[Path], table: CostTable) -> None:
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
            try:
                unfinished.write_text(table_to_json(table) + "\n", encoding="utf-8")
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            return
        except OSError as error:
            log.info("the cost table cannot be kept in %s: %s", path.parent, error)


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left; writing takes milliseconds."""
    # The folder may hold other people's files, and other servers sweep it.
    for path in folder.glob(f"{'[0-9a-f]' * NAME_DIGITS}.json.*{UNFINISHED}"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def table_name(*, files: Sequence[str], device: str, num_threads: int, max_batch: int) -> str:
    """Return the file name of the table of these models on this machine; ``files`` are digests of all that they run."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    processor = next((one for one in lines if one.startswith("model name")), platform.processor())
    installed = [found for name in PACKAGES for found in metadata.distributions(name=name)]
    versions = sorted({f"{found.name} {found.version}" for found in installed})
    hardware = [platform.machine(), processor, os.cpu_count()]
    key = [SCHEMA, sorted(files), device, num_threads, max_batch, hardware, versions]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return f"{digest[:NAME_DIGITS]}.json"


def table_to_json(table: CostTable) -> str:
    """Return the table as JSON; ``table_from_json`` gives it back exactly."""
    return json.dumps(asdict(table), indent=2, sort_keys=True)


def table_from_json(text: str) -> CostTable:
    """Return the table that ``table_to_json`` wrote; ValueError where the text is not such a table."""
    try:
        content = json.loads(text)
        for name in ("target", "draft", "catch_up", "trees"):
            content[name] = _model_from(content[name])
        for name in ("read", "draft_read"):  # tables of models without an encoder may lack them
            content[name] = _model_from(content.get(name))
        rows = {RowKind(kind): RowCosts(**row) for kind, row in content["host"]["rows"].items()}
        content["host"] = HostCosts(**{**content["host"], "rows": rows})
        content["capacities"] = tuple(content["capacities"])
        return CostTable(**content)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a cost table: {error!r}") from error


def _model_from(content: dict[str, Any] | None) -> ModelCosts | None:
    if not content:
        return None
    content["seconds"] = tuple(map(tuple, content["seconds"]))
    for name in ("batches", "tokens"):
        content[name] = tuple(content[name])
    return ModelCosts(**content)
