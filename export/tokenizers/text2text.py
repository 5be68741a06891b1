"""The tokenizers of an encoder-decoder checkpoint as files of a bundle, and what the bundle says of its texts.

Checkpoints that have a ``tokenizer.json``, or whose tokenizer Transformers makes one of, keep it. Others, of
SentencePiece models, are converted and held against the checkpoint's own tokenizer (``agreement``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import SOURCE_TOKENIZER_FILE, EncoderDecoder, used_ids
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.export.tokenizers.agreement import check_agreement
from outrider.export.tokenizers.generation import (
    banned_tokens,
    decoder_prefix,
    generation_defaults,
    read_generation,
)
from outrider.export.tokenizers.own import OwnTokenizer
from outrider.export.tokenizers.pieces import tokenizer_description
from tokenizers import Tokenizer
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of a checkpoint, each the contents of a ``tokenizer.json``.

    Attributes:
        answers: of what the decoder writes.
        sources: of what the encoder reads; None where ``answers`` reads that too.
    """

    answers: str
    sources: str | None = None

    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Return the tokenizers of answers and of sources, which may be the same."""
        answers = Tokenizer.from_str(self.answers)
        return answers, answers if self.sources is None else Tokenizer.from_str(self.sources)


def write_tokenizers(path: Path, config: PretrainedConfig, out: Path) -> EncoderDecoder:
    """Write ``tokenizer.json`` and, where sources have their own, ``source_tokenizer.json``.

    Return what the manifest says of them.

    Args:
        path: the checkpoint's folder.
        config: of the checkpoint.
        out: the bundle's folder.

    Raises:
        BundleError: no tokenizer, one that cannot be converted, or an id beyond the model's vocabulary.
    """
    own = OwnTokenizer(path)
    pair = _fitting(path.name, _pair(path, own), own.languages.ids, config)
    generation = read_generation(path)
    prefix, target = decoder_prefix(path.name, config, generation, own.languages)
    found = EncoderDecoder(
        decoder_prefix=prefix,
        source_template=own.source_template(),
        languages=own.languages.ids,
        default_source_language=own.languages.source,
        default_target_language=own.languages.target or target,
        banned_token_ids=banned_tokens(config, generation),
        generation_defaults=generation_defaults(generation),
        has_source_tokenizer=pair.sources is not None,
        shares_vocabulary=own.shares_vocabulary,
    )
    _check_used_ids(path.name, found, config)
    (out / TOKENIZER_FILE).write_text(pair.answers, encoding="utf-8")
    if pair.sources is not None:
        (out / SOURCE_TOKENIZER_FILE).write_text(pair.sources, encoding="utf-8")
    return found


def read_tokenizers(path: Path, config: PretrainedConfig) -> TokenizerPair:
    """Return the tokenizers of a checkpoint's folder, as they would be written.

    Raises:
        BundleError: as ``write_tokenizers``.
    """
    own = OwnTokenizer(path)
    return _fitting(path.name, _pair(path, own), own.languages.ids, config)


def _pair(path: Path, own: OwnTokenizer) -> TokenizerPair:
    if backend := own.backend():
        file = path / TOKENIZER_FILE
        return TokenizerPair(file.read_text(encoding="utf-8") if file.is_file() else backend)
    written = {}
    for name, side in own.sides().items():
        description = tokenizer_description(path.name, side.model, side.vocabulary)
        written[name] = json.dumps(description, ensure_ascii=False)
        check_agreement(own, side, Tokenizer.from_str(written[name]), of_answers=name == "answers")
    if not written:
        raise BundleError(
            f"{path.name}: its tokenizer has no {TOKENIZER_FILE} and no SentencePiece model"
        )
    return TokenizerPair(**written)


def _fitting(
    name: str, pair: TokenizerPair, languages: Mapping[str, int], config: PretrainedConfig
) -> TokenizerPair:
    """Return the tokenizers without special tokens that the model has no embedding for; refuse other such tokens."""
    of_answers = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    sources = pair.sources and _without_special(pair.sources, config.vocab_size)
    found = TokenizerPair(_without_special(pair.answers, of_answers), sources)
    for tokenizer, size in zip(found.tokenizers(), (of_answers, config.vocab_size), strict=True):
        ids = tokenizer.get_vocab() | dict(languages)
        token = max(ids, key=ids.__getitem__)
        if ids[token] >= size:
            raise BundleError(
                f"{name}: token {token!r} has id {ids[token]}, but the model's vocabulary ends at {size - 1}"
            )
    return found


def _without_special(contents: str, vocab_size: int) -> str:
    """Drop special tokens beyond a vocabulary: summarisers of BART's family know no <mask>, their tokenizers do."""
    description = json.loads(contents)
    added = description["added_tokens"]
    beyond = {one["content"] for one in added if one["special"] and one["id"] >= vocab_size}
    if not beyond:
        return contents
    description["added_tokens"] = [one for one in added if one["content"] not in beyond]
    pieces = description["model"]["vocab"]
    if isinstance(pieces, dict):
        for token in beyond:
            pieces.pop(token, None)
    return json.dumps(description, ensure_ascii=False)


def _check_used_ids(name: str, found: EncoderDecoder, config: PretrainedConfig) -> None:
    """Refuse what stands around texts where the model has no embedding for it."""
    of_answers = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    for field, index, size in used_ids(found, config.vocab_size, of_answers):
        if index >= size:
            raise BundleError(
                f"{name}: {field} has id {index}, but the model's vocabulary ends at {size - 1}"
            )
