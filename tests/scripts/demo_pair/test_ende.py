"""The translating pair's training, on made-up catalogues and models of a few thousand weights."""

import gettext
import hashlib
import io
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from scripts.demo_pair.catalogues import catalogue_files, message_pairs, messages
from scripts.demo_pair.ende import DRAFT, SHARED_DRAFT, TARGET
from scripts.demo_pair.functions import documented_functions
from scripts.demo_pair.pair_card import by_task, export_pair, measure
from scripts.demo_pair.pair_training import (
    Batch,
    PairTrainer,
    Recipe,
    State,
    answer_logits,
    answer_loss,
    distillation_loss,
    load_trained,
)
from scripts.demo_pair.t5 import Shape, new_model, share_encoder
from scripts.demo_pair.text_pairs import (
    SUMMARIZE,
    TRANSLATE,
    Pair,
    batches,
    is_held_out,
    load_pairs,
    prepare,
)
from scripts.demo_pair.training import Run

VOCAB = 320
SHAPE = Shape(
    hidden=16, encoder_layers=2, decoder_layers=1, heads=2, intermediate=16, head_size=8, vocab=VOCAB
)  # fmt: skip
TINY = Recipe(SHAPE, learning_rate=1e-2, batch_tokens=400)

NAMES = ("file", "folder", "branch", "server", "message", "packet", "index", "object", "remote")
WORDS = ("Datei", "Ordner", "Zweig", "Server", "Nachricht", "Paket", "Index", "Objekt", "Ferne")
CODE = 'def first(values):\n    """Take the first of the values.\n\n    More."""\n    return values[0]\n'


def catalogue(pairs: dict[str, str]) -> bytes:
    """A message catalogue as msgfmt writes one."""
    entries = [(a.encode() + b"\0", b.encode() + b"\0") for a, b in sorted(pairs.items())]
    tables, texts = [b"", b""], b""
    at = 28 + 16 * len(entries)
    for entry in entries:
        for side, text in enumerate(entry):
            tables[side] += struct.pack("<2I", len(text) - 1, at + len(texts))
            texts += text
    header = struct.pack("<7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    return header + tables[0] + tables[1] + texts


def write_catalogue(folder: Path, name: str, pairs: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    everything = {"": "Content-Type: text/plain; charset=UTF-8\n", **pairs}
    (folder / name).write_bytes(catalogue(everything))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder made from a catalogue of regular messages and a file of one function."""
    root = tmp_path_factory.mktemp("ende")
    verbs = {"open": "öffnen", "remove": "löschen", "read": "lesen", "rename": "umbenennen"}
    pairs = {
        f"could not {verb} the {name}": f"{word} konnte man nicht {verbal}"
        for name, word in zip(NAMES, WORDS, strict=True)
        for verb, verbal in verbs.items()
    }
    write_catalogue(root / "locale/de/LC_MESSAGES", "made.mo", pairs)
    write_catalogue(root / "locale/de/LC_MESSAGES", "iso_names.mo", {"Afghanistan": "Afghanische"})
    (root / "library").mkdir()
    (root / "library/code.py").write_text(CODE)
    prepare(root / "work", root / "locale", root / "library", VOCAB)
    return root / "work"


@pytest.fixture
def pairs(work: Path) -> list[Pair]:
    return load_pairs(work / "train.npz")


def test_a_catalogue_gives_what_gettext_reads(tmp_path: Path) -> None:
    texts = {"open the file": "die Datei öffnen", "could not read": "nicht lesbar"}
    write_catalogue(tmp_path, "made.mo", texts)
    known = gettext.GNUTranslations(io.BytesIO((tmp_path / "made.mo").read_bytes()))
    assert message_pairs(tmp_path / "made.mo") == texts
    assert all(known.gettext(source) == answer for source, answer in texts.items())


def test_of_a_message_its_context_plural_and_what_says_nothing_are_left_out(tmp_path: Path) -> None:
    write_catalogue(
        tmp_path, "made.mo",
        {
            "menu\x04open a file": "öffnen", "one file left\0%d files left": "eine Datei\0%d Dateien",
            "the same text": "the same text", "short": "kurz", "not yet translated": "",
        },
    )  # fmt: skip
    assert message_pairs(tmp_path / "made.mo") == {
        "open a file": "öffnen",
        "one file left": "eine Datei",
    }


def test_what_is_no_catalogue_is_refused_and_one_in_another_code_is_empty(tmp_path: Path) -> None:
    for data in (b"", b"\x95\x04\x12\xde" + bytes(40)):
        with pytest.raises(ValueError, match="little-endian"):
            list(messages(data))
    (tmp_path / "old.mo").write_bytes(catalogue({"a long message": "x"}).replace(b"x\0", b"\xfc\0"))
    assert message_pairs(tmp_path / "old.mo") == {}


def test_lists_of_names_are_left_out_of_the_catalogues(work: Path) -> None:
    locales = work.parent / "locale"
    assert catalogue_files(locales, "de") == [Path("de/LC_MESSAGES/made.mo")]


def test_a_function_loses_its_docstring_and_keeps_the_first_paragraph_as_its_answer() -> None:
    found = list(documented_functions(CODE + "def other():\n    return 1\n"))
    assert found == [("def first(values):\n    return values[0]", "Take the first of the values.")]


def test_the_file_list_names_every_file_with_its_hash(work: Path) -> None:
    listed = dict(
        line.split("  ")[::-1] for line in (work / "files.sha256").read_text().splitlines()
    )
    paths = {
        "de/LC_MESSAGES/made.mo": work.parent / "locale/de/LC_MESSAGES/made.mo",
        "code.py": work.parent / "library/code.py",
    }
    assert listed == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()
    }


def test_pairs_begin_with_their_task_and_end_with_the_end_token(work: Path) -> None:
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    every = load_pairs(work / "train.npz") + load_pairs(work / "valid.npz")
    texts = [tokenizer.decode(pair.source.tolist()) for pair in every]
    assert len(texts) == 37
    assert sum(text.startswith(TRANSLATE) for text in texts) == 36
    assert sum(text.startswith(SUMMARIZE) for text in texts) == 1
    assert all(pair.source[-1] == pair.answer[-1] == 1 for pair in every)
    held_out = [tokenizer.decode(pair.source.tolist()) for pair in load_pairs(work / "valid.npz")]
    assert held_out == [text for text in texts if is_held_out(text)]
    assert held_out
    assert is_held_out(held_out[0] + "\n")


def test_every_pass_takes_each_pair_once_within_the_budget(pairs: list[Pair]) -> None:
    for rng in (None, np.random.default_rng(0)):
        made = batches(pairs, 200, rng)
        assert sorted(id(pair) for batch in made for pair in batch) == sorted(map(id, pairs))
        for batch in made:
            widths = max(len(p.source) for p in batch) + max(len(p.answer) for p in batch)
            assert len(batch) == 1 or widths * len(batch) <= 200


def test_logits_are_those_of_the_whole_model_on_each_pair_alone(pairs: list[Pair]) -> None:
    torch.manual_seed(0)
    model = new_model(SHAPE).eval()
    with torch.no_grad():
        model.decoder.block[0].layer[1].EncDecAttention.o.weight.normal_()
        chosen = [pairs[0], pairs[-1], pairs[7]]
        logits = answer_logits(model, Batch.of(chosen)).split([len(p.answer) for p in chosen])
        for pair, rows in zip(chosen, logits, strict=True):
            alone = model(
                input_ids=torch.from_numpy(pair.source)[None],
                labels=torch.from_numpy(pair.answer)[None],
            )
            torch.testing.assert_close(alone.logits[0], rows, rtol=1e-4, atol=1e-5)
            loss = answer_loss(rows, Batch.of([pair]), 0.0)
            torch.testing.assert_close(alone.loss, loss, rtol=1e-4, atol=1e-5)


def test_the_loss_falls_and_the_answer_comes_to_depend_on_the_source(pairs: list[Pair]) -> None:
    torch.manual_seed(0)
    trainer = PairTrainer(new_model(SHAPE), TINY, Run(steps=60), pairs, None)
    losses = trainer.train(answer_loss)
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.05)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert trainer.state.epoch > 0


def test_stopping_and_going_on_ends_in_the_same_weights(pairs: list[Pair], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = new_model(SHAPE)
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    whole = PairTrainer(model, TINY, Run(steps=16), pairs, None)
    losses = whole.train(answer_loss)
    again = new_model(SHAPE)
    again.load_state_dict(first)
    stopped = PairTrainer(again, TINY, Run(steps=16), pairs, tmp_path / "model.pt")
    for _ in range(9):
        stopped.step(answer_loss)
    stopped.save()
    assert (stopped.state.epoch, stopped.state.index) == (2, 1)
    resumed = PairTrainer(new_model(SHAPE), TINY, Run(steps=16), pairs, tmp_path / "model.pt")
    assert resumed.train(answer_loss) == losses[9:]
    loaded, state = load_trained(tmp_path / "model.pt", TINY)
    assert state.step == 16
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


def test_a_shared_encoder_stays_as_it_is_and_the_draft_comes_closer(pairs: list[Pair]) -> None:
    torch.manual_seed(0)
    deeper = replace(SHAPE, decoder_layers=2)
    target = PairTrainer(new_model(deeper), TINY, Run(steps=60), pairs, None)
    target.train(answer_loss)
    teacher = target.model.eval()
    draft = share_encoder(teacher, new_model(SHAPE))
    trainer = PairTrainer(draft, TINY, Run(steps=40), pairs, None)
    before = measure(teacher, draft.eval(), pairs)
    draft.train()
    trainer.train(distillation_loss(teacher, trainer.run))
    after = measure(teacher, draft.eval(), pairs)
    assert after.overlap > before.overlap + 0.05
    assert after.loss < before.loss
    encoder = teacher.encoder.state_dict()
    assert all(torch.equal(w, encoder[name]) for name, w in draft.encoder.state_dict().items())
    assert not torch.equal(draft.lm_head.weight, teacher.lm_head.weight)


def test_figures_of_a_model_beside_itself_are_its_loss_and_full_agreement(
    pairs: list[Pair],
) -> None:
    torch.manual_seed(0)
    model = new_model(SHAPE).eval()
    figures = measure(model, model, pairs)
    assert (figures.overlap, figures.agreement) == pytest.approx((1.0, 1.0), abs=1e-5)
    assert (figures.overlap_error, figures.agreement_error) == pytest.approx((0, 0), abs=1e-5)
    with torch.no_grad():
        each = [answer_logits(model, Batch.of([pair])) for pair in pairs]
        losses = [
            float(answer_loss(rows, Batch.of([pair]), 0)) * len(rows)
            for rows, pair in zip(each, pairs, strict=True)
        ]
    assert figures.loss == pytest.approx(sum(losses) / sum(map(len, each)), rel=1e-4)


def test_the_published_folders_load_and_the_card_states_what_they_measure(
    work: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target = new_model(SHAPE).eval()
    models = {
        "target": target,
        "draft": new_model(SHAPE).eval(),
        "shared_draft": share_encoder(target, new_model(SHAPE)).eval(),
    }
    figures = export_pair(
        models, dict.fromkeys(models, State(3, 60.0, 5)), work, tmp_path, "a remark"
    )
    loaded = {
        name: AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).float().eval()
        for name in models
    }
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    valid = by_task(load_pairs(work / "valid.npz"), tokenizer)
    for (task, name), one in figures.items():
        assert measure(loaded["target"], loaded[name], valid[task]) == one
    shared = loaded["shared_draft"].encoder.state_dict()
    for name, weight in loaded["target"].encoder.state_dict().items():
        assert torch.equal(weight, shared[name])
    assert loaded["target"].lm_head.weight is not loaded["target"].shared.weight
    card = (tmp_path / "README.md").read_text()
    assert "a remark" in card
    assert "passes) in 3 steps, 1 minutes" in card
    assert f"{figures['translate', 'draft'].overlap:.3f} ±" in card
    read = AutoTokenizer.from_pretrained(tmp_path / "target")
    ids = read("könnte é€\n")["input_ids"]
    assert ids[-1] == read.eos_token_id == 1
    assert read.decode(ids, skip_special_tokens=True) == "könnte é€\n"


def test_the_pair_has_the_agreed_sizes() -> None:
    sizes = {}
    with torch.device("meta"):
        for name, recipe in {"target": TARGET, "draft": DRAFT, "shared": SHARED_DRAFT}.items():
            sizes[name] = new_model(recipe.shape).num_parameters() / 1e6
    assert 2 < sizes["target"] < 6
    assert sizes["draft"] < sizes["target"] / 3
    assert 2 * sum(sizes.values()) < 20
    assert TARGET.shape.encoder_layers == SHARED_DRAFT.shape.encoder_layers
    assert TARGET.shape.hidden == SHARED_DRAFT.shape.hidden
