"""Drafts with another tokenizer: tokens are equal by their bytes, and graphs take and give the target's ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from outrider.engines.base import BundleError, Span
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.opening import open_pair
from outrider.engines.pair import Pair
from outrider.export.certificate.certify import certify_bundle
from outrider.export.graph.other_ids import NEVER
from outrider.export.model_config import ModelConfig, read_model_config
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.export.tokenizers import twins
from outrider.export.tokenizers.twins import spelled, token_maps
from outrider.runtime.verify.command import verify
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import VOCAB_SIZE, write_tokenizer
from tests.mutants import assert_caught
from tests.runtime.markov import answers_with_and_without

NUM_OWN = 400
PROMPTS = ((5, 9, 5, 9), (2, 8, 2, 8, 2), (30, 31, 300) * 3, (450,), (9, 5, 9, 5, 7, 7))


def byte_level(text: str, size: int) -> Tokenizer:
    """A byte-level BPE of another text, whose control tokens are called otherwise, in another order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "[begin]", "[end]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Pieces with the mark of a space, bytes, and an unknown token."""
    pieces = ["<unk>", "<s>", "</s>", "▁the", "▁", "the", "once", "▁up", "on", "\n"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return tokenizer


def config(size: int, *, bos: int, eos: int) -> ModelConfig:
    return read_model_config(
        LlamaConfig(vocab_size=size, bos_token_id=bos, eos_token_id=eos, num_hidden_layers=1)
    )


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return byte_level("the small house the small house once upon a sea of seas " * 3, NUM_OWN)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def check_maps(theirs: Tokenizer, ours: Tokenizer) -> None:
    """Every entry of both maps by its definition, token by token."""
    maps = token_maps(
        (theirs, config(VOCAB_SIZE, bos=0, eos=1)), (ours, config(NUM_OWN, bos=1, eos=2))
    )
    assert maps.target_ids.shape == (NUM_OWN,) and maps.draft_ids.shape == (VOCAB_SIZE,)
    decode = {index: ours.decode([index]) for index in range(3, ours.get_vocab_size())}
    kept = maps.target_ids[maps.target_ids >= 0]
    assert len(set(kept.tolist())) == len(kept)
    assert (maps.target_ids[1], maps.target_ids[2], maps.target_ids[0]) == (0, 1, -1)
    assert (maps.draft_ids[0], maps.draft_ids[1]) == (1, 2)
    for index in range(2, theirs.get_vocab_size()):
        text = theirs.decode([index])
        twin = int(maps.draft_ids[index])
        if "\ufffd" in text:
            assert spelled(ours)[twin].endswith(spelled(theirs)[index][-1:])
        elif text in decode.values():
            assert decode[twin] == text and maps.target_ids[twin] == index
        else:
            assert twin == ours.encode(text).ids[-1] and index not in kept
    # Rows behind the tokenizer's ids stand for nothing.
    assert all(maps.draft_ids[theirs.get_vocab_size() :] == 2)
    shared = np.isin(np.arange(VOCAB_SIZE), kept)
    assert 0.5 < maps.share_of_vocabulary == shared.mean() < 1
    assert maps.share_of(np.flatnonzero(~shared)) == 0


def test_tokens_are_equal_by_their_bytes(theirs: Tokenizer, ours: Tokenizer) -> None:
    check_maps(theirs, ours)


def test_pieces_and_bytes_are_told_from_one_another(theirs: Tokenizer) -> None:
    pieces = sentencepiece()
    maps = token_maps(
        (theirs, config(VOCAB_SIZE, bos=0, eos=1)), (pieces, config(300, bos=1, eos=2))
    )
    known = {text: index for index, text in spelled(theirs).items()}
    for piece, text in (("▁the", b" the"), ("▁", b" "), ("<0xE2>", b"\xe2"), ("\n", b"\n")):
        own = pieces.token_to_id(piece)
        assert maps.target_ids[own] == known[text] and maps.draft_ids[known[text]] == own
    # The byte of a new line spells the same as the new line before it, and is not proposed.
    assert maps.target_ids[pieces.token_to_id("<0x0A>")] == -1
    assert maps.target_ids[pieces.token_to_id("<unk>")] == -1


def test_words_are_not_compared(theirs: Tokenizer) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "house": 1}, unk_token="the"))
    with pytest.raises(BundleError, match="byte-level BPE or SentencePiece"):
        token_maps((theirs, config(VOCAB_SIZE, bos=0, eos=1)), (words, config(2, bos=0, eos=1)))


def write_draft(folder: Path, tokenizer: Tokenizer) -> Path:
    own = LlamaConfig(
        vocab_size=NUM_OWN, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(own).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bundles(
    tiny_checkpoints: tuple[Path, Path], ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Bundle, list[str]]:
    """A target with a draft of other tokens, that draft alone, and what the export said."""
    folder, told = tmp_path_factory.mktemp("twins"), []
    draft = write_draft(folder / "draft", ours)
    options = ExportOptions(max_context=256, max_batch=4, max_tree_nodes=16)
    for name, target, beside in (("both", tiny_checkpoints[0], draft), ("alone", draft, None)):
        export_bundle(
            target=target, draft=beside, out=folder / name, options=options, progress=told.append
        )
    return load_bundle(folder / "both"), load_bundle(folder / "alone"), told


@pytest.fixture(scope="module")
def pair(bundles: tuple[Bundle, Bundle, list[str]]) -> Iterator[Pair]:
    opened = open_pair(bundles[0], max_batch=4, with_trees=True)
    yield opened
    opened.close()


def test_an_export_says_how_much_a_draft_can_propose(
    bundles: tuple[Bundle, Bundle, list[str]], tiny_checkpoints: tuple[Path, Path]
) -> None:
    bundle, _, told = bundles
    shares = bundle.manifest.certificate["draft"]["other_tokens"]
    (line,) = [one for one in told if "no more of its drafts are ever kept" in one]
    assert f"{shares['of_text']:.3f} of the tokens of 2048" in line
    assert line.endswith("does better") is (shares["of_text"] < 0.95)
    assert bundle.manifest.draft is not None and bundle.manifest.draft.vocab_size == VOCAB_SIZE
    with pytest.raises(BundleError, match="draft: its graphs take the target's ids"):
        certify_bundle(bundle, {"draft": bundle.root.parent / "draft"})


def test_a_drafts_logits_stand_at_its_targets_ids(
    bundles: tuple[Bundle, Bundle, list[str]], pair: Pair, theirs: Tokenizer, ours: Tokenizer
) -> None:
    maps = token_maps(
        (theirs, config(VOCAB_SIZE, bos=0, eos=1)), (ours, config(NUM_OWN, bos=1, eos=2))
    )
    text = tuple(range(0, VOCAB_SIZE, 37))
    own = tuple(maps.draft_ids[list(text)].tolist())
    alone = open_pair(bundles[1], max_batch=4, with_trees=True)
    try:
        for parents in (None, tuple(range(len(text) - 1))):
            answers = []
            for engine, tokens in ((pair.draft, text), (alone.target, own)):
                assert engine is not None
                engine.trim([])
                spans = [
                    Span(slot=0, start=0, tokens=tokens, num_logits=len(text), parents=parents),
                    Span(slot=1, start=0, tokens=tokens[:1], num_logits=1),
                ]
                spans = spans[:1] if parents else spans
                answers.append(engine.extend(spans)[0, : len(text)].copy())
            mapped, plain = answers
            twins_of = np.flatnonzero(maps.target_ids >= 0)
            assert np.array_equal(mapped[:, maps.target_ids[twins_of]], plain[:, twins_of])
            others = np.setdiff1d(np.arange(VOCAB_SIZE), maps.target_ids)
            assert len(others) > 50 and (mapped[:, others] == np.float32(NEVER)).all()
    finally:
        alone.close()


def test_every_graph_of_the_draft_takes_the_targets_ids(
    bundles: tuple[Bundle, Bundle, list[str]],
) -> None:
    bundle = bundles[0]
    graphs = sorted((bundle.root / "draft").glob("*.onnx"))
    assert {"model.onnx", "grouped.onnx", "tree.onnx"} <= {one.name for one in graphs}
    for path in graphs:
        graph = onnx.load(path, load_external_data=False).graph
        onnx.checker.check_model(str(path))
        if any(one.name == "logits" for one in graph.output):
            (logits,) = [one for one in graph.output if one.name == "logits"]
            assert logits.type.tensor_type.shape.dim[-1].dim_value == VOCAB_SIZE
            readers = [node.op_type for node in graph.node if "tokens" in node.input]
            assert readers == ["Gather"]


@pytest.mark.parametrize("drafter", ["model", "tree", "suffix+model"])
def test_answers_are_those_without_drafts(drafter: str, pair: Pair) -> None:
    plain, drafted, harness = answers_with_and_without(pair, drafter, PROMPTS, 12)
    assert drafted == plain
    assert sum(harness.finished(name).report.num_drafted for name in harness.events) > 10


def test_the_law_of_answers_is_the_targets(bundles: tuple[Bundle, Bundle, list[str]]) -> None:
    report = verify(bundles[0].root, num_samples=60, false_alarm=1e-6, seed=0)
    assert report.has_passed


MUTANTS = {
    "names are compared": ("return None if None in found else bytes(", "return piece.encode() or bytes("),
    "control tokens are words": ('if not one["special"]}', "}"),
    "the first token of a spelling is read": ("one.ids[-1] if last", "one.ids[0] if last"),
    "ends stand for beginnings": ("roles = ((begins[0], begins[1])", "roles = ((begins[1], begins[0])"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, theirs: Tokenizer, ours: Tokenizer
) -> None:
    assert_caught(monkeypatch, twins, *MUTANTS[name], lambda: check_maps(theirs, ours))


def test_a_description_of_a_tokenizer_is_read_as_its_library_does(theirs: Tokenizer) -> None:
    """The alphabet of bytes is the library's own."""
    letters = set(twins._byte_alphabet())
    assert letters == set(pre_tokenizers.ByteLevel.alphabet())
    assert json.loads(theirs.to_str())["decoder"]["type"] == "ByteLevel"
    assert all(
        theirs.decode([i]).encode() == text for i, text in spelled(theirs).items() if text.isascii()
    )
