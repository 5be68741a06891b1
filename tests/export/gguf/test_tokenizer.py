"""Tokenizers of GGUF files cut texts as the libraries do that their vocabularies were trained with."""

import io
import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
from outrider.engines.base import BundleError
from outrider.export.gguf.file import GgufFile, read_gguf
from outrider.export.gguf.tokenizer import read_tokens
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = Path(__file__).read_text(encoding="utf-8")
ODD = [
    "Grüße, 你好世界 naïve café 12345 3.14159 x  y",
    "  leading",
    "trailing  ",
    "\n\n a\r\n\tb",
    "I'LL we'Ve don't",
    "\u0065\u0301 \ufb01",
    "한국어 русский العربية हिन्दी 🙂",
    " " * 37,
    "a" * 60,
]
# As in the families' published tokenizer.json; each written out, not put together.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def lines() -> list[str]:
    """Lines of code and prose, odd texts, and random mixtures of their characters."""
    drawn, letters = random.Random(3), "".join(ODD) + "\u2028\u00a0"
    mixed = ["".join(drawn.choices(letters, k=drawn.randrange(1, 40))) for _ in range(2000)]
    return [*TEXT.splitlines(), *ODD, *mixed]


def by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def by_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


FAMILIES = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (by_digits(), None, False),
    "qwen2": (by_regex(QWEN2), normalizers.NFC(), False),
    "llama-bpe": (by_regex(LLAMA3), None, True),
    "tekken": (by_regex(TEKKEN), None, True),
}


def family(pre: str) -> Tokenizer:
    """A tokenizer of a family, trained on this file and the odd texts."""
    splits, normalizer, whole_words = FAMILIES[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *ODD], trainer)
    return tokenizer


def opened(path: Path, add: dict[str, object]) -> GgufFile:
    """A file without tensors, with metadata of a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in add.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf([path])


def byte_level(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(one) for one in model["merges"]]
    kinds = [3, 3, *([1] * (len(tokens) - 2)), 5]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "[PAD0]"],
        "token_type": kinds,
        "merges": merges,
        "eos_token_id": 1,
    }


@pytest.mark.parametrize("pre", FAMILIES)
def test_bytes_are_merged_as_the_family_does(tmp_path: Path, pre: str):
    tokenizer = family(pre)
    found = read_tokens(opened(tmp_path / "a.gguf", byte_level(tokenizer, pre)))
    texts = [*lines(), "<|im_start|>user\nhi<|im_end|>"]
    for text, ours, theirs in zip(
        texts, found.tokenizer.encode_batch(texts), tokenizer.encode_batch(texts), strict=True
    ):
        assert ours.ids == theirs.ids, text
        assert found.tokenizer.decode(ours.ids) == tokenizer.decode(ours.ids)
    assert found.end_ids == [1]
    assert found.config["chat_template"] == "{{ messages }}"
    assert found.tokenizer.token_to_id("[PAD0]") is None


@pytest.mark.parametrize("adds_space", [True, False])
def test_pieces_are_merged_as_sentencepiece_does(tmp_path: Path, adds_space: bool):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT.splitlines(), *ODD[:4]]),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
        minloglevel=2,
    )
    own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = range(own.get_piece_size())
    kinds = [
        2 if own.is_unknown(at) else 3 if own.is_control(at) else 6 if own.is_byte(at) else 1
        for at in count
    ]
    file = opened(
        tmp_path / "a.gguf",
        {
            "model": "llama",
            "tokens": [own.id_to_piece(at) for at in count],
            "scores": [own.get_score(at) for at in count],
            "token_type": kinds,
            "bos_token_id": own.bos_id(),
            "eos_token_id": own.eos_id(),
            "unknown_token_id": own.unk_id(),
            "add_space_prefix": adds_space,
        },
    )
    found = read_tokens(file)
    # SentencePiece has no line breaks within a text here, nor anything for an empty one.
    for line in filter(None, lines()):
        ids = found.tokenizer.encode(line).ids
        assert ids == [own.bos_id(), *own.encode(line)], line
        assert found.tokenizer.decode(ids) == own.decode(ids)
    assert found.end_ids == [own.eos_id()]


WRONG = {
    "unknown model": ({"model": "bert"}, "'bert' is not read"),
    "unknown pre": ({"pre": "falcon"}, "'falcon' is not read"),
    "no tokens": ({"tokens": 3}, "list of texts"),
    "no merges": ({"merges": 3}, "list of texts"),
    "half a merge": ({"merges": ["ab"]}, "a space between"),
    "a merge of nothing": ({"merges": ["zz qq"]}, "make no tokenizer"),
    "too few types": ({"token_type": [1]}, "a number for each token"),
    "an end beyond": ({"eos_token_id": 10_000}, "id of a token"),
    "no flag": ({"add_bos_token": 2}, "true or false"),
    "one token twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "are one token"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_tokenizer_that_is_not_read_is_refused_in_one_line(tmp_path: Path, name: str):
    changed, words = WRONG[name]
    pairs = byte_level(family("gpt-2"), "gpt-2") | changed
    file = opened(tmp_path / "wrong.gguf", pairs)
    with pytest.raises(BundleError, match=words) as refused:
        read_tokens(file)
    assert "\n" not in str(refused.value)
