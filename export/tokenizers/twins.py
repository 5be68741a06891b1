"""Tokens of one tokenizer in another's ids, for a draft that was trained with another tokenizer than its target.

Tokens are equal where they spell the same bytes, whatever they are called. Control tokens spell nothing: ends of a text
stand for one another, and so do beginnings. A draft proposes what has a twin alone; what it reads without one is the
last of the tokens that it would spell the same bytes with. So lengths stay as they are, and a worse context costs
acceptance alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from outrider.engines.base import BundleError, IntArray
from outrider.export.model_config import ModelConfig
from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMaps:
    """Which tokens of a draft and its target are the same.

    Attributes:
        target_ids: [V_draft] int64, of each of the draft's ids the target's; -1 where it has no twin, no id twice.
        draft_ids: [V] int64, of each of the target's ids what the draft reads for it.
    """

    target_ids: IntArray
    draft_ids: IntArray

    def share_of(self, tokens: IntArray) -> float:
        """Return the share of the target's tokens that the draft can propose: no more of them are ever kept."""
        return float(np.isin(tokens, self.target_ids).mean())

    @property
    def share_of_vocabulary(self) -> float:
        """The share of the target's ids that the draft can propose."""
        return self.share_of(np.arange(len(self.draft_ids)))


def token_maps(
    target: tuple[Tokenizer, ModelConfig], draft: tuple[Tokenizer, ModelConfig]
) -> TokenMaps:
    """Return the maps between two tokenizers, given with the vocabulary sizes and control tokens of their models.

    Raises:
        BundleError: of a tokenizer it is not known which bytes its tokens spell.
    """
    (theirs, target_config), (ours, draft_config) = target, draft
    wanted, known = spelled(theirs), spelled(ours)
    lowest: dict[bytes, int] = {}
    for index, text in sorted(known.items()):
        lowest.setdefault(text, index)
    draft_ids = np.full(target_config.vocab_size, _unknown(ours, draft_config), np.int64)
    target_ids = np.full(draft_config.vocab_size, -1, np.int64)
    missing = []
    for index, text in sorted(wanted.items()):
        if text not in lowest:
            missing.append(index)
            continue
        draft_ids[index] = lowest[text]
        # Of two ids that spell the same the lower one is proposed.
        if target_ids[lowest[text]] < 0:
            target_ids[lowest[text]] = index
    texts = [wanted[index].decode("utf-8", "replace") for index in missing]
    encoded = ours.encode_batch_fast(texts, add_special_tokens=False)
    for index, one in zip(missing, encoded, strict=True):
        # Bytes that are no text by themselves are read as the last of them.
        last = lowest.get(wanted[index][-1:]) if _is_broken(wanted[index]) else None
        if last is not None or one.ids:
            draft_ids[index] = one.ids[-1] if last is None else last
    for theirs_control, ours_control in _controls(target_config, draft_config):
        draft_ids[list(theirs_control)] = ours_control[0]
        for index, twin in zip(theirs_control, ours_control, strict=False):
            target_ids[twin] = index
    return TokenMaps(target_ids=target_ids, draft_ids=draft_ids)


def spelled(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes that each token but control tokens spells, by id.

    Raises:
        BundleError: they are neither those of byte-level BPE nor those of SentencePiece.
    """
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    added = {one["id"]: one for one in description["added_tokens"]}
    words = json.dumps([description["decoder"], description["pre_tokenizer"]])
    if '"ByteLevel"' in words:
        alphabet = _byte_alphabet()

        def spell(piece: str) -> bytes | None:
            found = [alphabet.get(letter) for letter in piece]
            return None if None in found else bytes(one for one in found if one is not None)

    elif _SPACE in json.dumps(description, ensure_ascii=False):

        def spell(piece: str) -> bytes | None:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()

    else:
        raise BundleError(
            "a draft with another tokenizer than its target's needs two that are byte-level BPE or SentencePiece"
        )
    found = {index: one["content"].encode() for index, one in added.items() if not one["special"]}
    for piece, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if index not in added and (text := spell(piece)):
            found[index] = text
    return found


def _byte_alphabet() -> Mapping[str, int]:
    """Return the letters that byte-level BPE writes bytes as: printable ones as they are, others from 256 on."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def _is_broken(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


def _unknown(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """Return what a draft reads in place of what it cannot spell."""
    named = getattr(tokenizer.model, "unk_token", None)
    found = None if named is None else tokenizer.token_to_id(named)
    return found if found is not None else next(iter(config.eos_token_ids), 0)


def _controls(
    target: ModelConfig, draft: ModelConfig
) -> Collection[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return control tokens of both that stand for one another: what begins a text, and what ends it."""
    begins = tuple(
        () if one.bos_token_id is None else (one.bos_token_id,) for one in (target, draft)
    )
    roles = ((begins[0], begins[1]), (target.eos_token_ids, draft.eos_token_ids))
    return [one for one in roles if all(one)]
