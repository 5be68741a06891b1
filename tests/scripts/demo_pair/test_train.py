"""The demo pair's training, on a handful of library files and models of a few thousand weights."""

import hashlib
import json
import math
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo_pair.card import export_pair, measure, window_figures
from scripts.demo_pair.samples import (
    PROMPT,
    WINDOW,
    Part,
    draft_text,
    package_files,
    sample,
    write_packages,
)
from scripts.demo_pair.text import (
    Tokens,
    corpus_files,
    held_out_windows,
    is_held_out,
    prepare,
    windows,
)
from scripts.demo_pair.train import DRAFT, TARGET
from scripts.demo_pair.training import (
    Recipe,
    Run,
    Trainer,
    distillation_loss,
    divergence,
    load_trained,
    rate,
    text_loss,
)

LIBRARY = Path(sysconfig.get_path("stdlib"))
NAMES = ("abc.py", "bisect.py", "colorsys.py", "heapq.py", "keyword.py", "queue.py", "this.py")
VOCAB = 320
TINY = Recipe(32, 1, 2, 1, 32, learning_rate=1e-2, batch=2, length=32, vocab=VOCAB)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder made from a few library files, at least one of them held out."""
    held_out = next(path for path in corpus_files(LIBRARY) if is_held_out(path))
    folder = tmp_path_factory.mktemp("work")
    prepare(folder, LIBRARY, sorted({Path(name) for name in NAMES} | {held_out}), VOCAB)
    return folder


@pytest.fixture
def tokens(work: Path) -> Tokens:
    return np.load(work / "train.npy")


def test_the_text_leaves_out_tests_and_installed_packages() -> None:
    files = corpus_files(LIBRARY)
    assert Path("heapq.py") in files
    assert files == sorted(files)
    assert not {"site-packages", "test", "idlelib"} & {part for f in files for part in f.parts}


def test_about_one_file_in_25_is_held_out_by_its_name() -> None:
    files = corpus_files(LIBRARY)
    held_out = sum(map(is_held_out, files))
    expected = len(files) / 25
    assert abs(held_out - expected) < 4 * math.sqrt(expected)


def test_the_file_list_names_every_file_with_its_hash(work: Path) -> None:
    lines = (work / "files.sha256").read_text().splitlines()
    assert len(lines) == len(NAMES) + 1
    for line in lines:
        digest, name = line.split("  ")
        assert digest == hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest()


def test_every_pass_takes_each_window_at_most_once(tokens: Tokens) -> None:
    positions = np.arange(len(tokens), dtype=np.int32)
    steps_per_pass = (len(tokens) - 33) // 32 // 2
    batches = [windows(positions, 2, 32, 1, step) for step in range(steps_per_pass)]
    starts = torch.cat([batch[:, 0] for batch in batches])
    assert len(set(starts.tolist())) == 2 * steps_per_pass
    assert all(batch.shape == (2, 33) for batch in batches)
    second = windows(positions, 2, 32, 1, steps_per_pass)
    assert second.tolist() != batches[0].tolist()


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    assert rate(0.0) < rate(0.01) < rate(0.02) == 1.0
    assert rate(0.5) < 1.0
    assert rate(1.0) == rate(1.5) == 0.0


def test_the_loss_falls_below_that_of_guessing_by_frequency(tokens: Tokens) -> None:
    losses = Trainer(TINY, Run(steps=60), None).train(tokens, text_loss)
    shares = np.bincount(tokens, minlength=VOCAB) / len(tokens)
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert np.mean(losses[-5:]) < entropy


def test_a_number_of_steps_gives_the_same_weights_again(tokens: Tokens) -> None:
    first, second, other = (Trainer(TINY, Run(steps=4, seed=s), None) for s in (1, 1, 2))
    losses = [trainer.train(tokens, text_loss) for trainer in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])


def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(
    tokens: Tokens, tmp_path: Path
) -> None:
    whole = Trainer(TINY, Run(steps=6), None)
    losses = whole.train(tokens, text_loss)
    stopped = Trainer(TINY, Run(steps=6), tmp_path / "model.pt")
    for _ in range(3):
        stopped.step(tokens, text_loss)
    stopped.save()
    resumed = Trainer(TINY, Run(steps=6), tmp_path / "model.pt")
    assert resumed.train(tokens, text_loss) == losses[3:]
    model, state = load_trained(tmp_path / "model.pt", TINY, "cpu")
    assert (state.step, state.tokens) == (6, 6 * 2 * 32)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_another_go_takes_the_weights_and_counts_on_with_a_budget_of_its_own(
    tokens: Tokens, tmp_path: Path
) -> None:
    first = Trainer(TINY, Run(steps=5), tmp_path / "first.pt")
    first.train(tokens, text_loss)
    go = Trainer(replace(TINY, learning_rate=1e-3), Run(steps=3), None)
    go.start_from(tmp_path / "first.pt")
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, go.model.state_dict()[name])
    assert go.state.progress(go.run) == 0
    assert len(go.train(tokens, text_loss)) == 3
    assert (go.state.step, go.state.tokens) == (8, 8 * 2 * 32)
    assert go.state.elapsed_s > first.state.elapsed_s


def test_the_part_of_the_variation_can_begin_above_nothing(tokens: Tokens) -> None:
    target = Trainer(TINY, Run(steps=1), None).model.eval()
    batch = torch.from_numpy(tokens[:33].astype(np.int64))[None]
    logits = torch.randn(1, 32, VOCAB, generator=torch.Generator().manual_seed(0))
    plain, half = (distillation_loss(target, Run(), part) for part in (0.0, 0.5))
    assert half(logits, batch, 0.5) == plain(logits, batch, 0.75)
    assert half(logits, batch, 0.0) != plain(logits, batch, 0.0)


def test_a_time_budget_ends_with_the_step_that_spends_it(tokens: Tokens) -> None:
    trainer = Trainer(TINY, Run(minutes=0.002), None)
    trainer.train(tokens, text_loss)
    assert trainer.state.elapsed_s >= 0.12
    assert trainer.state.progress(trainer.run) >= 1


def test_divergence_turns_from_kl_into_twice_the_total_variation() -> None:
    target_probs = torch.tensor([[0.5, 0.25, 0.25]])
    draft_probs = torch.tensor([[0.25, 0.25, 0.5]])
    logits = target_probs.log(), draft_probs.log()
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert divergence(*logits, 0.0).item() == pytest.approx(kl, abs=1e-6)
    assert divergence(*logits, 1.0).item() == pytest.approx(2 * 0.25, abs=1e-6)
    assert divergence(logits[0], logits[0], 0.5).item() == pytest.approx(0.0, abs=1e-6)


def test_distillation_brings_the_draft_closer_to_its_target(tokens: Tokens, work: Path) -> None:
    target = Trainer(TINY, Run(steps=30), None)
    target.train(tokens, text_loss)
    batch = held_out_windows(np.load(work / "valid.npy"), 4, 32)
    draft = Trainer(replace(TINY, hidden=16, learning_rate=2e-2), Run(steps=40), None)
    before = measure(target.model, draft.model, batch)
    draft.train(tokens, distillation_loss(target.model.eval(), draft.run))
    after = measure(target.model, draft.model, batch)
    assert after.target_loss == before.target_loss
    assert after.overlap > before.overlap + 0.05


def test_overlap_and_agreement_are_those_of_hand_computed_rows() -> None:
    target_probs = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]])
    draft_probs = torch.tensor([[0.2, 0.3, 0.5], [0.7, 0.1, 0.2]])
    following = torch.tensor([0, 1])
    figures = window_figures(target_probs.log(), draft_probs.log(), following)
    expected_target = -(math.log(0.5) + math.log(0.3)) / 2
    expected_draft = -(math.log(0.2) + math.log(0.1)) / 2
    assert figures == pytest.approx((expected_target, expected_draft, (0.7 + 0.8) / 2, 0.5))


def test_the_published_folders_load_and_the_card_states_what_they_measure(
    tokens: Tokens, work: Path, tmp_path: Path
) -> None:
    trainers = {
        "target": Trainer(TINY, Run(steps=2), None),
        "draft": Trainer(replace(TINY, hidden=16), Run(steps=2, seed=2), None),
    }
    for trainer in trainers.values():
        trainer.train(tokens, text_loss)
    models = {name: trainer.model.eval() for name, trainer in trainers.items()}
    history = {name: vars(trainer.state) for name, trainer in trainers.items()}
    figures = export_pair(models, history, work, tmp_path, 2, note="a remark")

    valid = np.load(work / "valid.npy")
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / name).float() for name in models]
    again = measure(loaded[0], loaded[1], held_out_windows(valid, 2, 512))
    assert again == figures
    card = (tmp_path / "README.md").read_text()
    assert f"{figures.overlap:.3f} ±" in card
    assert f"{figures.target_loss:.3f} (" in card
    assert "a remark" in card
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["dtype"] == "float16"


def test_the_published_tokenizer_puts_bos_first_and_gives_the_text_back(
    tokens: Tokens, work: Path, tmp_path: Path
) -> None:
    models = {name: Trainer(TINY, Run(), None).model for name in ("target", "draft")}
    history = {name: {"step": 0, "tokens": 0, "elapsed_s": 0.0} for name in models}
    export_pair(models, history, work, tmp_path, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    text = "def f(x):\n    return 'é€'\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == models["draft"].config.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == models["draft"].config.eos_token_id == tokens[-1]
    assert len(tokenizer) == VOCAB


def test_the_pair_has_the_agreed_sizes() -> None:
    target, draft = (
        Trainer(recipe, Run(), None).model.num_parameters() for recipe in (TARGET, DRAFT)
    )
    assert 10e6 <= target <= 18e6
    assert 10 <= target / draft <= 30


def test_a_draft_reads_the_shares_of_its_parts_and_leaves_out_what_is_not_there(
    tmp_path: Path,
) -> None:
    rows = np.arange(6, dtype=np.int32).repeat(WINDOW)
    np.save(tmp_path / "train.npy", rows)
    np.save(tmp_path / "samples.npy", rows[:WINDOW] + 100)
    parts = (Part("train", 4 * WINDOW), Part("packages", 5), Part("samples", 9 * WINDOW, 2))
    text, words = draft_text(tmp_path, parts)
    assert words == "2,048 tokens of train.npy, 512 tokens of samples.npy (2 times)"
    windows_read = text.reshape(-1, WINDOW)
    assert len(windows_read) == 6
    assert all(len(set(window)) == 1 for window in windows_read)
    assert len(set(windows_read[:4, 0])) == 4
    assert windows_read[4:, 0].tolist() == [100, 100]


def test_package_text_has_no_tests_and_ends_every_file(work: Path, tmp_path: Path) -> None:
    source = (LIBRARY / "heapq.py").read_text()
    for name in ("pack/code.py", "pack/more.py", "pack/tests/code.py", "pack/test_it.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "pack/short.py").write_text("x = 1\n")
    assert package_files(tmp_path, 1) == [Path("pack/code.py"), Path("pack/more.py")]
    shutil.copy(work / "tokenizer.json", tmp_path)
    count = write_packages(tmp_path, tmp_path, 1)
    written = np.load(tmp_path / "packages.npy")
    assert len(written) == count
    assert np.array_equal(written[: count // 2], written[count // 2 :])
    assert written[-1] == 1


def test_samples_go_on_behind_prompts_of_the_text(tokens: Tokens) -> None:
    model = Trainer(replace(TINY, length=512), Run(), None).model.eval()
    first, again = (sample(model, tokens, 1, batch=2) for _ in range(2))
    assert np.array_equal(first, again)
    rows = first.reshape(2, WINDOW)
    prompts = [row[:PROMPT].tolist() for row in rows]
    text = tokens.tolist()
    assert all(any(text[i : i + PROMPT] == p for i in range(len(text))) for p in prompts)
    assert not np.array_equal(rows[0, PROMPT:], rows[1, PROMPT:])
