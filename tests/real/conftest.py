"""Folders of published models, where OUTRIDER_REAL_MODELS names them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of the models' folders."""
    folder = os.environ.get("OUTRIDER_REAL_MODELS")
    if not folder:
        pytest.skip("no real models: OUTRIDER_REAL_MODELS names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def prompts(models: Path) -> list[str]:
    """HumanEval's."""
    lines = (models / "humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]
