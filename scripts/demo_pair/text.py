"""The text of the demo pair: the CPython standard library, its tokenizer, its batches.

Files are held out for validation by a hash of their name, so that the split is the same on every
machine; neither tokenizer nor training sees them.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|bos|>", "<|endoftext|>"
# Tests, generated tables and files that differ from machine to machine say little about code.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_ONE_IN = 25

Tokens = npt.NDArray[np.int32]


def corpus_files(root: Path) -> list[Path]:
    """Source files below ``root`` that make up the text, sorted, relative to ``root``."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        path
        for path in found
        if not EXCLUDED_FOLDERS & set(path.parts)
        and not any(part.startswith(EXCLUDED_PREFIXES) for part in path.parts)
    )


def name_hash(path: Path) -> int:
    """A number of 32 bits that depends on a file's relative name alone."""
    return int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big")


def is_held_out(path: Path) -> bool:
    """Whether a file is kept for validation; depends on its relative name alone."""
    return name_hash(path) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab`` tokens; encoding a text puts the bos token first.

    Raises:
        ValueError: the text is too small for that many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def prepare(work: Path, root: Path, files: list[Path], vocab: int) -> None:
    """Write the tokenizer, the file list and the tokens of both parts of the text to ``work``.

    ``train.npy`` and ``valid.npy`` are [num_tokens] int32: per file bos, text, end of text.
    """
    work.mkdir(parents=True, exist_ok=True)
    texts = {path: (root / path).read_text("utf-8", errors="replace") for path in files}
    parts = {
        "train": [path for path in files if not is_held_out(path)],
        "valid": [path for path in files if is_held_out(path)],
    }
    tokenizer = train_tokenizer((texts[path] for path in parts["train"]), vocab)
    end = [tokenizer.token_to_id(EOS)]
    for name, paths in parts.items():
        encoded = tokenizer.encode_batch([texts[path] for path in paths])
        tokens = [np.array(e.ids + end, np.int32) for e in encoded]
        np.save(work / f"{name}.npy", np.concatenate(tokens))
    (work / "files.sha256").write_text("".join(hash_line(root, path) for path in files))
    tokenizer.save(str(work / "tokenizer.json"))


def hash_line(root: Path, path: Path) -> str:
    """One line of ``files.sha256``; ``sha256sum --check`` in the library folder reads it."""
    return f"{hashlib.sha256((root / path).read_bytes()).hexdigest()}  {path.as_posix()}\n"


def windows(tokens: Tokens, batch: int, length: int, seed: int, step: int) -> torch.Tensor:
    """Batch number ``step``, [batch, length + 1] int64; each pass takes every window once."""
    num_windows = (len(tokens) - length - 1) // length
    epoch, index = divmod(step, num_windows // batch)
    generator = np.random.default_rng((seed, epoch))
    offset = int(generator.integers(length))
    chosen = generator.permutation(num_windows)[index * batch : (index + 1) * batch]
    rows = [tokens[offset + w * length : offset + (w + 1) * length + 1] for w in chosen]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def held_out_windows(tokens: Tokens, num_windows: int, length: int) -> torch.Tensor:
    """At most ``num_windows`` windows spread evenly over the text, [N, length + 1] int64."""
    available = (len(tokens) - 1) // length
    chosen = np.linspace(0, available - 1, min(num_windows, available)).round().astype(int)
    rows = [tokens[w * length : (w + 1) * length + 1] for w in chosen]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
