"""Text for the draft alone: other people's source, and what the target itself writes.

A draft is asked about the target's own answers, and about prompts that the target has not learnt by
heart. On the text it was trained on a target is surer than anywhere else, so a draft that learns its
probabilities there alone follows it badly in service (Zhou et al. 2024, DistillSpec, section 4: on-policy data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from scripts.demo_pair.text import EOS, Tokens, name_hash

WINDOW = 512
PROMPT = 64
PACKAGES, SAMPLES = "packages", "samples"
_TEMPERATURES = (1.0, 1.0, 1.0, 0.5)
_TEST_FOLDERS = frozenset({"test", "tests", "testing", "benchmarks"})
_SIZES = range(500, 200_000)
_FILES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Part:
    """How much of ``<name>.npy`` a draft reads in one pass, in tokens, and how often."""

    name: str
    num_tokens: int
    repeats: int = 1


DRAFT_PARTS = (Part("train", 1_200_000), Part(PACKAGES, 4_500_000), Part(SAMPLES, 1408 * WINDOW, 2))


def package_files(root: Path, one_in: int) -> list[Path]:
    """One source file in ``one_in`` of the packages installed below ``root``, without tests, relative."""
    found = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [
        path
        for path in found
        if not _TEST_FOLDERS & set(path.parts)
        and not any(part.startswith(("test_", "_test")) for part in path.parts)
        and name_hash(path) % one_in == 0
        and (root / path).stat().st_size in _SIZES
    ]


def write_packages(work: Path, root: Path, one_in: int) -> int:
    """Tokenise installed packages into ``work/packages.npy``; the number of tokens."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end = [tokenizer.token_to_id(EOS)]
    files, pieces = package_files(root, one_in), []
    for first in range(0, len(files), _FILES_AT_ONCE):
        several = files[first : first + _FILES_AT_ONCE]
        texts = [(root / path).read_text("utf-8", errors="replace") for path in several]
        pieces += [np.array(e.ids + end, np.int32) for e in tokenizer.encode_batch(texts)]
    tokens = np.concatenate(pieces)
    np.save(work / f"{PACKAGES}.npy", tokens)
    return len(tokens)


def sample(
    target: LlamaForCausalLM, tokens: Tokens, num_tokens: int, *, batch: int = 128, seed: int = 3
) -> Tokens:
    """What the target writes behind prompts of ``PROMPT`` tokens out of ``tokens``.

    Three batches in four are drawn at temperature 1, the fourth at 0.5, from the whole distribution.

    Returns:
        at least ``num_tokens`` tokens, [num_tokens] int32, windows of ``WINDOW`` one after another.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rounds = -(-num_tokens // (batch * WINDOW))
    pieces = []
    for round_ in track(range(rounds), "sampling"):
        starts = rng.integers(0, len(tokens) - PROMPT, batch)
        prompts = np.stack([tokens[start : start + PROMPT] for start in starts])
        ids = torch.from_numpy(prompts.astype(np.int64))
        with torch.no_grad():
            written = target.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                temperature=_TEMPERATURES[round_ % len(_TEMPERATURES)],
                min_new_tokens=WINDOW - PROMPT,
                max_new_tokens=WINDOW - PROMPT,
                pad_token_id=target.config.eos_token_id,
            )
        pieces.append(written.numpy().astype(np.int32).reshape(-1))
    return np.concatenate(pieces)


def draft_text(work: Path, parts: Sequence[Part] = DRAFT_PARTS) -> tuple[Tokens, str]:
    """One pass of a draft's text, and what it is made of in words; parts not in ``work`` are left out."""
    pieces, words = [], []
    rng = np.random.default_rng(0)
    for part in parts:
        path = work / f"{part.name}.npy"
        if not path.exists():
            continue
        tokens: Tokens = np.load(path)
        rows = tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW)
        chosen = rows[rng.permutation(len(rows))[: part.num_tokens // WINDOW]].reshape(-1)
        pieces += [chosen] * part.repeats
        times = f" ({part.repeats} times)" if part.repeats > 1 else ""
        words.append(f"{len(chosen):,} tokens of {part.name}.npy{times}")
    return np.concatenate(pieces), ", ".join(words)
