"""SentencePiece models as a ``tokenizer.json`` that keeps the ids of a checkpoint.

A checkpoint's ids may come from a file of its own, and several SentencePiece models may share them (Marian has one for
sources and one for answers). So a piece has the checkpoint's id, and a token that is no piece of this model is spelled
so that no text has it. Every text's spaces become ``META`` before the model sees them: a spelling with a space in it is
never found. The decoder takes ``UNREACHED`` away again.

Ensures: the ids of the checkpoint's own tokenizer, with three exceptions. A piece without an id is the unknown token
there; a Unigram model here cuts the text into smaller pieces. Characters that this model does not know, but that have
ids, are found one by one; there only one that stands alone. Where a compatibility character stands before a combining
mark that Unicode does not compose with it, ``Precompiled`` loses the mark.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engines.base import BundleError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken

META = "\u2581"
"""What SentencePiece writes for a space."""
UNREACHED = f" {META}"
"""In front of tokens that no text is cut into."""

# Of SentencePiece's ModelProto.SentencePiece.Type and TrainerSpec.ModelType.
_NORMAL, _USER_DEFINED = 1, 4
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids of a checkpoint.

    Attributes:
        tokens: spellings by id.
        piece_ids: ids by piece; the unknown token's where a piece has none.
        unknown_id: of the unknown token.
        added: tokens that are found in any text, whole, by id.
    """

    tokens: Mapping[int, str]
    piece_ids: Mapping[str, int]
    unknown_id: int
    added: Mapping[int, AddedToken]


def read_model(data: bytes) -> Any:
    """Return a SentencePiece model's description, a ``ModelProto``."""
    return sentencepiece_model_pb2.ModelProto.FromString(data)


def piece_names(model: Any) -> tuple[str, ...]:
    """Return the pieces that texts are cut into, in the model's order."""
    return tuple(piece.piece for piece in _pieces(model))


def _pieces(model: Any) -> list[Any]:
    return [piece for piece in model.pieces if piece.type in (_NORMAL, _USER_DEFINED)]


def tokenizer_description(name: str, model: Any, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the contents of a ``tokenizer.json``, without a template.

    Args:
        name: of the checkpoint, for messages.
        model: see ``read_model``.
        vocabulary: the checkpoint's ids.

    Raises:
        BundleError: the model is neither Unigram nor BPE, or writes spaces in another way.
    """
    normal, kind = model.normalizer_spec, model.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise BundleError(f"{name}: its SentencePiece model is neither Unigram nor BPE")
    if not normal.escape_whitespaces or model.trainer_spec.treat_whitespace_as_suffix:
        raise BundleError(
            f"{name}: its SentencePiece model does not write spaces in front of words"
        )
    scores = {piece.piece: piece.score for piece in _pieces(model)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, token) for index, token in sorted(vocabulary.added.items())],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normal)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(with_first_space=normal.add_dummy_prefix),
        "model": (_unigram if kind == _UNIGRAM else _bpe)(vocabulary, scores),
    }


def _normalizers(normal: Any) -> list[dict[str, Any]]:
    """Return what a text goes through before it is cut."""
    steps: list[dict[str, Any]] = []
    if normal.precompiled_charsmap:
        charsmap = base64.b64encode(normal.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normal.remove_extra_whitespaces:
        steps += [_replace({"Regex": "^ +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if normal.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": META})
    steps.append(_replace({"String": " "}, META))
    if normal.remove_extra_whitespaces:
        steps.append(_replace({"Regex": f"{META}+$"}, ""))
    return steps


def _decoder(*, with_first_space: bool) -> dict[str, Any]:
    scheme = "always" if with_first_space else "never"
    spaces = {"type": "Metaspace", "replacement": META, "prepend_scheme": scheme, "split": True}
    return {"type": "Sequence", "decoders": [_replace({"String": UNREACHED}, ""), spaces]}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _added(index: int, token: AddedToken) -> dict[str, Any]:
    return {
        "id": index,
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": False,
        "special": token.special,
    }


def _spellings(vocabulary: Vocabulary, scores: Mapping[str, float]) -> list[str]:
    """Return the spelling of each id: plain where texts have it, else one that none has."""
    spelled = []
    for index in range(max((*vocabulary.tokens, *vocabulary.added)) + 1):
        token = vocabulary.tokens.get(index, "")
        is_piece = token in scores and vocabulary.piece_ids.get(token) == index
        is_foreign = len(token) == 1 and token not in scores
        if index in vocabulary.added:
            spelled.append(vocabulary.added[index].content)
        elif index == vocabulary.unknown_id or is_piece or is_foreign:
            spelled.append(token)
        else:
            spelled.append(f"{UNREACHED}{token}")
    return spelled


def _unigram(vocabulary: Vocabulary, scores: Mapping[str, float]) -> dict[str, Any]:
    # What is no piece has no rival where it is found: any score will do.
    spelled = _spellings(vocabulary, scores)
    return {
        "type": "Unigram",
        "unk_id": vocabulary.unknown_id,
        "vocab": [[token, scores.get(token, 0.0)] for token in spelled],
        "byte_fallback": False,
    }


def _bpe(vocabulary: Vocabulary, scores: Mapping[str, float]) -> dict[str, Any]:
    # Pieces without an id are merged like others, and end as the unknown token.
    ids = dict.fromkeys(scores, vocabulary.unknown_id)
    spelled = _spellings(vocabulary, scores)
    ids |= {token: index for index, token in enumerate(spelled)}
    return {
        "type": "BPE",
        "unk_token": spelled[vocabulary.unknown_id],
        "fuse_unk": True,
        "byte_fallback": False,
        "vocab": ids,
        "merges": _merges(scores),
    }


def _merges(scores: Mapping[str, float]) -> list[Sequence[str]]:
    """Return the pairs of pieces that make a piece, in the order in which SentencePiece joins them."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
