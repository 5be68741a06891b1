"""One architecture: a tiny checkpoint, opened and exported."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path

import numpy as np
from outrider.engines.base import BundleError
from outrider.export.certificate.parity_cases import certified_prompts
from outrider.export.certificate.reference import reference_logits
from outrider.export.checkpoint import open_checkpoint
from outrider.export.part import Sizes, export_part, make_part
from outrider.export.progress import Progress
from safetensors.numpy import save_file

from scripts.lab.sweep.record import BROKEN, EXPORTED, REFUSED, Outcome
from scripts.lab.sweep.tiny import MAX_CONTEXT, declared_config, random_model, tiny_config

_SIZES = Sizes(max_context=MAX_CONTEXT, max_batch=4, max_gamma=4, max_tree_nodes=16)
_MOST_DIFFERENCE = 1e-4


def try_architecture(name: str) -> Outcome:
    """Return what comes of an architecture's tiny checkpoint.

    It has no weights until its configuration was accepted.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        try:
            config = tiny_config(name)
            declared_config(config).save_pretrained(folder)
            # No weights yet: whatever is refused from here on is refused by its configuration.
            save_file({}, folder / "model.safetensors")
            try:
                open_checkpoint(folder, max_context=MAX_CONTEXT)
            except BundleError as error:
                return _refused(name, error, folder)
            random_model(config).save_pretrained(folder)
            return _exported(name, folder, Path(scratch))
        except BundleError as error:
            return Outcome(name=name, outcome=BROKEN, reason=f"late: {_one_line(error, folder)}")
        except Exception as error:  # a stranger's code: what it raises is the finding
            return Outcome(name=name, outcome=BROKEN, reason=_where(error))


def _exported(name: str, folder: Path, root: Path) -> Outcome:
    checkpoint = open_checkpoint(folder, max_context=MAX_CONTEXT)
    part = make_part("target", checkpoint, "float32")
    _, certificate = export_part(part, root / "bundle", _SIZES, Progress(_unheard))
    prompts = certified_prompts(checkpoint.model_config, _SIZES.max_gamma)
    largest = float(np.abs(reference_logits(checkpoint.load(), prompts)).max())
    difference = float(f"{_worst(certificate) / largest:.1e}")
    if difference > _MOST_DIFFERENCE:
        return Outcome(name=name, outcome=BROKEN, reason=f"differs by {difference} of its logits")
    return Outcome(name=name, outcome=EXPORTED, difference=difference)


def _unheard(stage: str) -> None:
    """Say nothing of an export's stages."""


def _worst(certificate: object) -> float:
    """Return the largest difference anywhere in a certificate."""
    if not isinstance(certificate, dict):
        return 0.0
    own = float(certificate.get("max_difference", 0.0))
    return max([own, *map(_worst, certificate.values())])


def _refused(name: str, error: BundleError, folder: Path) -> Outcome:
    message = str(error)
    if "\n" in message:
        return Outcome(name=name, outcome=BROKEN, reason=f"several lines: {message}")
    return Outcome(name=name, outcome=REFUSED, reason=_one_line(error, folder))


def _one_line(error: Exception, folder: Path) -> str:
    return " ".join(str(error).removeprefix(f"{folder.name}: ").split())


def _where(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text}"
