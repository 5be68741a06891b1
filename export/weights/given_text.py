"""A text of one's own as calibration data, instead of text that the model writes (``written_text``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from outrider.engines.base import BundleError, IntArray
from outrider.export.model_config import ModelConfig
from outrider.export.weights.written_text import (
    NUM_ROWS,
    NUM_TOKENS,
    WrittenText,
    answers_to,
)
from tokenizers import Tokenizer

# Tokens of a longer text are not even counted: rows are few.
_MOST_LETTERS = 1 << 22


def read_rows(file: Path, tokenizer: Tokenizer) -> IntArray:
    """Return rows [B, T] int64 of a text file, spread evenly over it.

    Raises:
        BundleError: it cannot be read, is not UTF-8, or is too short to fill the rows; says how short.
    """
    name = f"calibration_text {file.name}"
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{name}: must be UTF-8: {error}") from error
    except OSError as error:
        raise BundleError(f"{name}: cannot be read: {error.strerror}") from error
    if not text.strip():
        raise BundleError(f"{name}: is empty")
    tokens = np.array(
        tokenizer.encode(text[:_MOST_LETTERS], add_special_tokens=False).ids, np.int64
    )
    wanted = NUM_ROWS * NUM_TOKENS
    if len(tokens) < wanted:
        raise BundleError(f"{name}: has {len(tokens)} tokens, at least {wanted} are wanted")
    starts = np.linspace(0, len(tokens) - NUM_TOKENS, NUM_ROWS).astype(np.int64)
    return np.stack([tokens[start : start + NUM_TOKENS] for start in starts])


def given_text(path: Path, model_config: ModelConfig, rows: IntArray) -> WrittenText:
    """Return rows [B, T] int64 as a text; to a model with an encoder they are sources, which it answers.

    ``path`` is its canonical graph.
    """
    if model_config.source is not None:
        return answers_to(path, model_config, rows)
    return WrittenText(rows[:, : model_config.max_position])
