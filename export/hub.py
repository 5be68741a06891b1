"""Checkpoints by their names on the Hugging Face Hub: fetched once, at a commit that is told.

A name is ``organisation/model``, with ``@revision`` behind it if another than the main branch is wanted. Only what an
export reads is fetched: configurations, tokenizers, chat templates and weights in safetensors; no pickle, no code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from outrider.engines.base import BundleError

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_TEXTS = (".json", ".jinja", ".txt", ".model", ".spm")
_TEMPLATES = "additional_chat_templates"
# As Transformers names weights; others are copies in another precision or another layout.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint's folder, and where it is from: "organisation/model@commit", or nothing for a folder."""

    path: Path
    source: str = ""


def is_name(path: Path) -> bool:
    """Return whether there is no such folder, and it has the form of a name on the Hub."""
    return not path.exists() and _NAME.fullmatch(path.as_posix()) is not None


def locate(path: Path) -> Located:
    """Return the folder at ``path`` or, where there is none and it is a name on the Hub, that of the fetched model.

    Raises:
        BundleError: no such folder and no such name, no network, a model that wants permission, or one without
            weights in safetensors; says which.
    """
    found = _NAME.fullmatch(path.as_posix())
    if found is None or not is_name(path):
        return Located(path)
    name, revision = found["name"], found["revision"]
    with _in_a_line(name, revision), _bars_for_people():
        info = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
        commit = str(info.sha)
        files = wanted_files([one.rfilename for one in info.siblings or ()])
        if not any(file.endswith(".safetensors") for file in files):
            raise BundleError(f"{name}: has no weights in safetensors, and no others are read")
        folder = snapshot_download(name, revision=commit, allow_patterns=files)
    return Located(Path(folder), f"{name}@{commit}")


def wanted_files(files: Sequence[str]) -> list[str]:
    """Return those of a repository's files that an export reads."""
    weights = [file for file in files if _WEIGHTS.fullmatch(file)]
    if not weights:
        weights = [
            file
            for file in files
            if file.endswith(".safetensors") and "/" not in file and "consolidated" not in file
        ]
    return [*filter(_is_text, files), *weights]


def _is_text(file: str) -> bool:
    folder = str(PurePosixPath(file).parent)
    return file.endswith(_TEXTS) and folder in (".", _TEMPLATES)


@contextmanager
def _in_a_line(name: str, revision: str | None) -> Iterator[None]:
    """Say in one line why a model cannot be fetched."""
    try:
        yield
    except GatedRepoError as error:
        rule = "asks for permission: accept its terms on the Hub and log in (hf auth login)"
        raise BundleError(f"{name}: {rule}") from error
    except RepositoryNotFoundError as error:
        rule = "neither a folder nor a model of the Hub, or one that wants a login"
        raise BundleError(f"{name}: {rule}") from error
    except RevisionNotFoundError as error:
        raise BundleError(f"{name}: has no revision {revision}") from error
    except HfHubHTTPError as error:
        words = str(error).splitlines()[0]
        raise BundleError(f"{name}: no such folder, and the Hub refuses: {words}") from error
    except OfflineModeIsEnabled as error:
        raise BundleError(
            f"{name}: no such folder, and HF_HUB_OFFLINE forbids to ask the Hub"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        words = " ".join(str(error).split())
        raise BundleError(
            f"{name}: no such folder, and the Hub does not answer: {words}"
        ) from error


@contextmanager
def _bars_for_people() -> Iterator[None]:
    """Keep bars out of logs: only a terminal gets those of huggingface_hub."""
    hides = not (sys.stderr.isatty() or are_progress_bars_disabled())
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()
