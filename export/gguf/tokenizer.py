"""Tokenizers of GGUF files as ``tokenizer.json``: BPE over bytes, and SentencePiece's BPE by scores.

Nothing is guessed: a text cut in another way than in training is a silent loss. A way to cut (``tokenizer.ggml.pre``)
that is not written here is refused by name.

Source: llama.cpp, llama-vocab.cpp (regular expressions by ``pre``); tokenizer.json as published by each family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from outrider.engines.base import BundleError
from outrider.export.gguf.file import GgufFile
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

# Types of tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How texts are cut before their bytes are merged.

    Attributes:
        pattern: what is cut off; None for that of GPT-2.
        single_digits: digits are cut off first, one by one.
        is_composed: characters are composed first (NFC).
        whole_words: a word that is a token is not merged from its bytes.
    """

    pattern: str | None = None
    single_digits: bool = False
    is_composed: bool = False
    whole_words: bool = False


_GPT2, _DIGITS = _Split(), _Split(single_digits=True)
_LLAMA_BPE = _Split(pattern=_LLAMA3, whole_words=True)
_QWEN = _Split(pattern=_QWEN2, is_composed=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "smaug-bpe": _LLAMA_BPE,
    "dbrx": _Split(pattern=_LLAMA3),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _Split(pattern=_TEKKEN, whole_words=True),
}
# Ends of a turn or a text by their names, which the file's own ids of ends need not all be.
_ENDS = frozenset({
    "<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end_of_turn|>",
    "<end_of_turn>", "<|end_of_role|>", "<EOT>", "</s>",
})  # fmt: skip
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokens:
    """The tokens of a file.

    Attributes:
        tokenizer: that makes them of a text.
        config: fields of ``tokenizer_config.json``, the chat template included.
        special_ids: of the model's configuration, by fields such as "bos_token_id"; None where the file has none.
        end_ids: of all tokens that end an answer.
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    special_ids: dict[str, int | None]
    end_ids: list[int]


def read_tokens(file: GgufFile) -> GgufTokens:
    """Return the tokens of a file.

    Raises:
        BundleError: its tokenizer is none that is read, or is incomplete; says which.
    """
    vocabulary = _Vocabulary(file)
    kind = vocabulary.pairs.get("model")
    if kind == "gpt2":
        tokenizer, adds_begin = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, adds_begin = _sentence_pieces(vocabulary), True
    else:
        raise BundleError(
            f"{file.name}: tokenizer.ggml.model {str(kind)[:40]!r} is not read; gpt2 and llama are"
        )
    tokenizer.add_special_tokens(vocabulary.added(_CONTROL))
    tokenizer.add_tokens(vocabulary.added(_USER_DEFINED))
    ids = {name: vocabulary.special_id(key) for name, key in _NAMED.items()}
    special = {name: vocabulary.tokens[index] for name, index in ids.items() if index is not None}
    begin = ids["bos_token"]
    adds_begin = vocabulary.flag("add_bos_token", default=adds_begin) and begin is not None
    before = f"{special['bos_token']}:0 " if adds_begin else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A:0",
        pair=f"{before}$A:0 {before.replace(':0', ':1')}$B:1",
        special_tokens=[(special["bos_token"], begin)] if adds_begin else [],
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    template = file.pairs.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return GgufTokens(
        tokenizer=tokenizer,
        config=config,
        special_ids={f"{name}_id": index for name, index in ids.items()},
        end_ids=vocabulary.end_ids(),
    )


class _Vocabulary:
    """The tokens of a file as it lists them.

    Attributes:
        pairs: metadata of the tokenizer.
        tokens: texts by id.
    """

    def __init__(self, file: GgufFile) -> None:
        prefix = "tokenizer.ggml."
        self.name = file.name
        self.pairs = {
            key.removeprefix(prefix): value
            for key, value in file.pairs.items()
            if key.startswith(prefix)
        }
        self.tokens: list[str] = self.pairs.get("tokens", [])
        if not isinstance(self.tokens, list) or not self.tokens:
            raise self.broken("tokens", "must be a list of texts")
        kinds = self.pairs.get("token_type")
        self._kinds = [1] * len(self.tokens) if kinds is None else self.numbers("token_type")

    def numbers(self, key: str) -> list[Any]:
        """Return a number per token."""
        found = self.pairs.get(key)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise self.broken(key, "must be a number for each token")
        numbers: list[Any] = found.tolist()
        return numbers

    def scores(self) -> list[float]:
        """Return a score per token; users' own, which are cut off before all else, have the greatest."""
        return [
            math.inf if kind == _USER_DEFINED else score
            for score, kind in zip(self.numbers("scores"), self._kinds, strict=True)
        ]

    def flag(self, key: str, *, default: bool) -> bool:
        found = self.pairs.get(key, default)
        if not isinstance(found, bool):
            raise self.broken(key, "must be true or false")
        return found

    def special_id(self, key: str) -> int | None:
        """Return the id of a special token, None where the file has none."""
        found = self.pairs.get(key)
        if found is not None and (type(found) is not int or found not in range(len(self.tokens))):
            raise self.broken(key, "must be the id of a token")
        return found

    def ids(self) -> dict[str, int]:
        """Return ids by text, without tokens that only fill the model's vocabulary up.

        Raises:
            BundleError: a text has two ids.
        """
        found: dict[str, int] = {}
        for index, (text, kind) in enumerate(zip(self.tokens, self._kinds, strict=True)):
            if kind != _UNUSED and found.setdefault(text, index) != index:
                raise self.broken("tokens", f"ids {found[text]} and {index} are one token")
        return found

    def added(self, kind: int) -> list[AddedToken]:
        """Return the tokens of a type that are found in any text; runs of spaces are merged instead."""
        return [
            AddedToken(text, special=kind == _CONTROL, normalized=False)
            for text, one in zip(self.tokens, self._kinds, strict=True)
            if one == kind and text.strip(" ")
        ]

    def end_ids(self) -> list[int]:
        """Return the ids of tokens that end an answer, by the file's word or by their names."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        said = {self.special_id(key) for key in keys} - {None}
        named = {
            index
            for index, (text, kind) in enumerate(zip(self.tokens, self._kinds, strict=True))
            if kind == _CONTROL and text in _ENDS
        }
        return sorted(index for index in said | named if index is not None)

    def broken(self, key: str, rule: str) -> BundleError:
        return BundleError(f"{self.name}: tokenizer.ggml.{key}: {rule}")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of bytes, and whether its texts begin with a token where the file does not say."""
    pre = vocabulary.pairs.get("pre")
    split = _SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        raise vocabulary.broken("pre", f"{str(pre)[:40]!r} is not read; {', '.join(_SPLITS)} are")
    merges = vocabulary.pairs.get("merges")
    if not isinstance(merges, list):
        raise vocabulary.broken("merges", "must be a list of texts")
    split_merges = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in split_merges):
        raise vocabulary.broken("merges", "must each be two tokens with a space between")
    pairs = [(left, right) for left, right in split_merges]
    tokenizer = _bpe(vocabulary, vocabulary.ids(), pairs, ignore_merges=split.whole_words)
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    uses_own = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_own))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split is _LLAMA_BPE


def _sentence_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """Return a tokenizer that merges the pair whose token has the greatest score, as SentencePiece does."""
    # Runs of spaces are listed as such.
    ids = {
        _SPACE * len(text) if text and not text.strip(" ") else text: index
        for text, index in vocabulary.ids().items()
    }
    scores = vocabulary.scores()
    unknown = vocabulary.special_id("unknown_token_id")
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    if unknown is not None:
        options["unk_token"] = vocabulary.tokens[unknown]
    tokenizer = _bpe(vocabulary, ids, _merges(ids, scores), **options)
    spaces = normalizers.Replace(" ", _SPACE)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", default=True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a third, in the order of its score; of equal ones, of its id."""
    found = []
    for text, index in ids.items():
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        known = [(left, right) for left, right in pairs if left in ids and right in ids]
        found += [
            (-scores[index], index, ids[left], ids[right], left, right) for left, right in known
        ]
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(
    vocabulary: _Vocabulary, ids: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab=ids, merges=list(merges), **options))
    # Of the library, which has one class of errors for a merge that makes no token.
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        raise vocabulary.broken("merges", f"make no tokenizer: {words}") from error


def write_tokens(tokens: GgufTokens) -> tuple[str, str]:
    """Return the contents of ``tokenizer.json`` and of ``tokenizer_config.json``."""
    return tokens.tokenizer.to_str(), json.dumps(tokens.config, ensure_ascii=False, indent=1)
