"""The text of the translating pair: sources with their answers, the tokenizer of both, batches of like length.

Two tasks, told apart by what a source begins with: English messages answered by their German translation, and Python
functions answered by what their docstring says. Pairs are held out by a hash of their source, so that the split is the
same on every machine; neither tokenizer nor training sees them.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from scripts.bench.tools.sources import SUMMARIZE, TRANSLATE
from scripts.demo_pair.catalogues import catalogue_files, message_pairs
from scripts.demo_pair.functions import function_pairs
from scripts.demo_pair.text import HELD_OUT_ONE_IN, corpus_files

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, EOS_ID = 0, 1
LANGUAGE = "de"
VOCAB = 4096
LONGEST_SOURCE, LONGEST_ANSWER = 160, 96
_MIXED = 3.0  # tokens

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and its answer, tokens of both with the end token."""

    source: Tokens
    answer: Tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of both."""
        return len(self.source) + len(self.answer)


def is_held_out(source: str) -> bool:
    """Whether a pair is kept for validation; depends on its source alone, not on the space around it."""
    digest = hashlib.sha256(source.strip().encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def gather(locales: Path, library: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """Every source with its answer, and the files that they come from, by names relative to their folders.

    The first answer to a source counts.
    """
    answers: dict[str, str] = {}
    files: dict[str, Path] = {}
    for task, folder, names, pairs_of in (
        (TRANSLATE, locales, catalogue_files(locales, LANGUAGE), message_pairs),
        (SUMMARIZE, library, corpus_files(library), function_pairs),
    ):
        for name in names:
            if pairs := pairs_of(folder / name):
                files[name.as_posix()] = folder / name
            for source, answer in pairs.items():
                answers.setdefault(task + source, answer)
    return answers, files


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab`` tokens; encoding a text puts the end token last, as T5's does.

    Raises:
        ValueError: the text is too small for that many tokens.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def prepare(work: Path, locales: Path, library: Path, vocab: int = VOCAB) -> None:
    """Write tokenizer.json, train.npz, valid.npz and files.sha256 into ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    answers, files = gather(locales, library)
    parts: Mapping[str, list[tuple[str, str]]] = {"train": [], "valid": []}
    for pair in answers.items():
        parts["valid" if is_held_out(pair[0]) else "train"].append(pair)
    tokenizer = train_tokenizer((text for pair in parts["train"] for text in pair), vocab)
    tokenizer.save(str(work / "tokenizer.json"))
    for name, texts in parts.items():
        _save(work / f"{name}.npz", _encode(tokenizer, texts))
    lines = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files.items()
    )
    (work / "files.sha256").write_text("".join(lines))


def _encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """Tokens of pairs; those that are longer than the longest are left out."""
    sources = tokenizer.encode_batch([source for source, _ in texts])
    answers = tokenizer.encode_batch([answer for _, answer in texts])
    pairs = (
        Pair(np.array(source.ids), np.array(answer.ids))
        for source, answer in zip(sources, answers, strict=True)
    )
    return [
        pair
        for pair in pairs
        if len(pair.source) <= LONGEST_SOURCE and len(pair.answer) <= LONGEST_ANSWER
    ]


def _save(path: Path, pairs: Sequence[Pair]) -> None:
    """Write pairs as one array of tokens and one of lengths, [N, 2]."""
    tokens = np.concatenate([part for pair in pairs for part in (pair.source, pair.answer)])
    lengths = np.array([(len(pair.source), len(pair.answer)) for pair in pairs])
    np.savez(path, tokens=tokens.astype(np.uint16), lengths=lengths)


def load_pairs(path: Path) -> list[Pair]:
    """The pairs that ``prepare`` wrote to a file."""
    with np.load(path) as values:
        tokens, lengths = values["tokens"].astype(np.int64), values["lengths"]
    parts = np.split(tokens, lengths.reshape(-1).cumsum()[:-1])
    return [Pair(parts[at], parts[at + 1]) for at in range(0, len(parts), 2)]


def batches(
    pairs: Sequence[Pair], num_tokens: int, rng: np.random.Generator | None = None
) -> list[list[Pair]]:
    """Pairs alike in length together, at most ``num_tokens`` a batch where each row is as long as the longest.

    With ``rng`` pairs whose answers differ by less than ``_MIXED`` tokens change places, and so do the batches.
    """
    lengths = np.array([(len(pair.answer), len(pair.source)) for pair in pairs], dtype=np.float64)
    if rng is not None:
        lengths += rng.random(lengths.shape) * _MIXED
    made: list[list[Pair]] = [[]]
    widest = (0, 0)
    for at in np.lexsort((lengths[:, 1], lengths[:, 0] // _MIXED)):
        pair = pairs[at]
        grown = (max(widest[0], len(pair.source)), max(widest[1], len(pair.answer)))
        if made[-1] and sum(grown) * (len(made[-1]) + 1) > num_tokens:
            made.append([])
            grown = (len(pair.source), len(pair.answer))
        made[-1].append(pair)
        widest = grown
    if rng is not None:
        made = [made[at] for at in rng.permutation(len(made))]
    return made


def padded(rows: Sequence[Tokens], fill: int) -> torch.Tensor:
    """Rows in one matrix, [N, longest] int64, ``fill`` behind the shorter ones."""
    width = max(map(len, rows))
    matrix = np.full((len(rows), width), fill)
    for row, tokens in zip(matrix, rows, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(matrix)
