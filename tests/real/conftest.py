"""Folders of published models, where OUTRIDER_REAL_MODELS names them, and their bundles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from outrider.export.pipeline import ExportOptions, export_bundle

Bundles = Callable[..., Path]
DRAFTS: Mapping[str, str] = {"qwen-coder-1.5b": "qwen-coder-0.5b"}


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


@pytest.fixture(scope="session")
def bundle_of(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Exports a model in a kind of weights, once; kept where OUTRIDER_REAL_BUNDLES names a folder."""
    kept = os.environ.get("OUTRIDER_REAL_BUNDLES")
    root = Path(kept) if kept else tmp_path_factory.mktemp("bundles")

    def exported(name: str, weights: str = "float32") -> Path:
        bundle, draft = root / f"{name}-{weights}", DRAFTS.get(name)
        if not (models / name).exists():
            pytest.skip(f"no real models: {name} is missing")
        if not bundle.exists():
            export_bundle(
                target=models / name,
                draft=models / draft if draft else None,
                out=bundle,
                options=ExportOptions(weights=weights, max_context=8192),
                progress=lambda _: None,
            )
        return bundle

    return exported
