"""Checkpoint folders of tiny tokenizers, trained here: configurations and tokenizers, no weights."""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
from outrider.export.tokenizers.pieces import read_model
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Writer = Callable[[str, Path], Path]

ENGLISH = (
    "The committee will publish its report before the end of the week.",
    "She asked whether the old bridge could carry so many people at once.",
    "Nobody expected the results, least of all the people who paid for them.",
    "A small change in temperature can make a large difference to the sea.",
    "Prices rose by 12.5 % in 2024, and they are expected to rise again (slowly).",
    "I would rather walk than wait for a train that never comes!",
)
GERMAN = (
    "Der Ausschuss wird seinen Bericht vor dem Ende der Woche veröffentlichen.",
    "Sie fragte, ob die alte Brücke so viele Menschen auf einmal tragen könnte.",
    "Niemand hatte das Ergebnis erwartet, am wenigsten die, die es bezahlten.",
    "Eine kleine Änderung der Temperatur macht einen großen Unterschied für das Meer.",
    "Die Preise stiegen 2024 um 12,5 %, und sie sollen weiter steigen (langsam).",
    "Ich gehe lieber zu Fuß, als auf einen Zug zu warten, der nie kommt!",
)
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn")


@cache
def trained(kind: str, texts: tuple[str, ...]) -> bytes:
    """Return a SentencePiece model of at most 150 pieces."""
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=out,
        vocab_size=150,
        model_type=kind,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def pieces(model: bytes) -> list[str]:
    """Return a model's pieces without <unk>, <s> and </s>."""
    processor = SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]


def dump(path: Path, values: object) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def ids(*tokens: Iterable[str]) -> dict[str, int]:
    return {
        token: index for index, token in enumerate(dict.fromkeys(t for row in tokens for t in row))
    }


def write_marian(folder: Path, kind: str, without: str = "") -> None:
    """Write a checkpoint of two SentencePiece models over one vocabulary, in which ``without`` has no id."""
    source, target = trained(kind, ENGLISH), trained(kind, GERMAN)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    both = sorted({*pieces(source), *pieces(target)} - {without})
    vocabulary = ids(["</s>", "<unk>"], both, [">>deu<<", "<pad>"])
    dump(folder / "vocab.json", vocabulary)
    pad = vocabulary["<pad>"]
    config = {"vocab_size": pad + 1, "decoder_start_token_id": pad, "pad_token_id": pad}
    dump(folder / "config.json", {"model_type": "marian", **SIZES, **config})


def write_m2m100(
    folder: Path, kind: str, added: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Write a checkpoint of one SentencePiece model, with ``added`` pieces by their scores."""
    proto = read_model(trained(kind, ENGLISH + GERMAN))
    for piece, score in added.items():
        proto.pieces.add(piece=piece, score=score)
    model = proto.SerializeToString()
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    vocabulary = ids(["<s>", "<pad>", "</s>", "<unk>"], pieces(model))
    dump(folder / "vocab.json", vocabulary)
    size = len(vocabulary) + 108  # a hundred languages, eight spare ones
    dump(folder / "config.json", {"model_type": "m2m_100", **SIZES, "vocab_size": size})


def write_plbart(folder: Path) -> None:
    model = trained("unigram", ENGLISH)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    dump(folder / "config.json", {"model_type": "plbart", **SIZES, "vocab_size": 200})
    dump(folder / "tokenizer_config.json", {"src_lang": "python", "tgt_lang": "__en_XX__"})


def write_mbart(folder: Path, named: dict[str, str], start: int | None) -> None:
    (folder / "sentencepiece.bpe.model").write_bytes(trained("unigram", ENGLISH))
    config = {"model_type": "mbart", **SIZES, "vocab_size": 300, "decoder_start_token_id": start}
    dump(folder / "config.json", config)
    dump(folder / "tokenizer_config.json", named)


def write_t5(folder: Path) -> None:
    (folder / "spiece.model").write_bytes(trained("unigram", ENGLISH))
    config = {"model_type": "t5", "vocab_size": 300, "d_model": 16, "num_layers": 1}
    dump(folder / "config.json", {**config, "decoder_start_token_id": 0})


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(ENGLISH, trainer)
    return tokenizer


def write_bart(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "tokenizer.json"))
    dump(folder / "tokenizer_config.json", {"tokenizer_class": "BartTokenizer"})
    asked = {"num_beams": 4, "no_repeat_ngram_size": 3, "forced_bos_token_id": 0}
    dump(folder / "config.json", {"model_type": "bart", **SIZES, "vocab_size": 300, **asked})


def write_blenderbot(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    dump(folder / "tokenizer_config.json", {"tokenizer_class": "BlenderbotTokenizer"})
    dump(folder / "config.json", {"model_type": "blenderbot", **SIZES, "vocab_size": 300})


def write_pegasus(folder: Path) -> None:
    reserved = [f"<unk_{number}>" for number in range(2, 103)]
    tokens = [
        "<pad>",
        "</s>",
        "<mask_1>",
        "<mask_2>",
        *reserved,
        "<unk>",
        *pieces(trained("unigram", ENGLISH)),
    ]
    tokenizer = Tokenizer(models.Unigram([(token, 0.0) for token in tokens], unk_id=105))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    dump(folder / "tokenizer_config.json", {"tokenizer_class": "PegasusTokenizer"})
    dump(folder / "config.json", {"model_type": "pegasus", **SIZES, "vocab_size": 300})


def write_nllb(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([*LANGUAGES])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": [*LANGUAGES]}
    dump(folder / "tokenizer_config.json", named)
    dump(folder / "config.json", {"model_type": "m2m_100", **SIZES, "vocab_size": 310})


MBART50 = {"tokenizer_class": "MBart50Tokenizer", "src_lang": "en_XX", "tgt_lang": "ro_RO"}
WRITERS: dict[str, Callable[[Path], None]] = {
    "marian": lambda folder: write_marian(folder, "unigram"),
    "marian-bpe": lambda folder: write_marian(folder, "bpe"),
    "m2m100": lambda folder: write_m2m100(folder, "bpe"),
    "m2m100-unigram": lambda folder: write_m2m100(folder, "unigram"),
    "plbart": write_plbart,
    "mbart": lambda folder: write_mbart(folder, {"src_lang": "en_XX"}, None),
    "mbart50": lambda folder: write_mbart(folder, MBART50, 2),
    "t5": write_t5,
    "bart": write_bart,
    "blenderbot": write_blenderbot,
    "pegasus": write_pegasus,
    "nllb": write_nllb,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a family's checkpoint, once."""

    @cache
    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        WRITERS[family](folder)
        return folder

    return write
