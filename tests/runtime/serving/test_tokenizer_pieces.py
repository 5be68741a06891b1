"""What a token adds to a text, where its tokenizer's decoder looks at no neighbours."""

from pathlib import Path

import numpy as np
import pytest
from outrider.runtime.core.text import IncrementalDecoder
from outrider.runtime.serving.tokenizer import TokenizersCodec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "def naïve(x):\n    return 'é€😀' * x  # 日本語"


def codec(folder: Path, decoder: decoders.Decoder) -> TokenizersCodec:
    """Of one token per byte, one added word and one special token."""
    vocab = {letter: index for index, letter in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    tokenizer.add_tokens(["€wort"])
    tokenizer.add_special_tokens(["<end>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizersCodec(path)


class WithoutPieces:
    def __init__(self, codec: TokenizersCodec) -> None:
        self.decode = codec.decode


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_add_up_to_the_text(tmp_path: Path, skip: bool) -> None:
    bytewise = codec(tmp_path, decoders.ByteLevel())
    draws = np.random.default_rng(0).integers(0, len(ALPHABET) + 2, 400).tolist()
    for tokens in (bytewise.encode(TEXT), tuple(draws)):
        streams = [
            IncrementalDecoder(one, tokens[:3], skip_special_tokens=skip)
            for one in (bytewise, WithoutPieces(bytewise))
        ]
        quick, plain = ([stream.push(token) for token in tokens[3:]] for stream in streams)
        assert quick == plain
    pieces = [bytewise.piece(token, skip) for token in range(len(ALPHABET) + 2)]
    assert pieces[-2:] == ["€wort", "" if skip else "<end>"]
    assert sum(piece is not None for piece in pieces) == 128 + 2


def test_a_decoder_that_looks_at_neighbours_has_no_pieces(tmp_path: Path) -> None:
    spaced = codec(tmp_path, decoders.Metaspace())
    assert spaced.piece(0, True) is None
