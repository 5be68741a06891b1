"""A target with a head: exported, and served; features keep the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError, EngineError, FloatArray, Span
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.manifest import Manifest
from outrider.engines.bundle.manifest_rules import check_manifest
from outrider.engines.heads import HeadEngine
from outrider.engines.onnx import calls
from outrider.engines.onnx.calls import PaddedCall
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.opening import open_engine, open_pair
from outrider.engines.pair import Pair
from outrider.export.checkpoint import open_checkpoint
from outrider.export.heads.part import check_features, features_text, head_beside, target_features
from outrider.export.pipeline import ExportOptions, export_bundle
from outrider.runtime.verify.command import verify

from scripts.check_parity import random_model
from tests.conftest import VOCAB_SIZE, write_tokenizer
from tests.export.heads.heads_models import HIDDEN, write_head
from tests.mutants import assert_caught
from tests.runtime.markov import Harness, answers_with_and_without

TAPS = (0, 1, 1)
TEXT = tuple(range(3, 23))
MAX_TOKENS = 16
PROMPTS = ((5, 9, 5, 9), (2, 8, 2, 8, 2), (30, 31, 32) * 3, (4,), (9, 5, 9, 5, 7, 7))


def export(target: Path, folder: Path, **options: object) -> Bundle:
    """Export a target with a head that is narrower than it, and has 100 of its ids."""
    head = write_head(folder / "head", target_hidden=64, vocab=VOCAB_SIZE, num_ids=100, taps=TAPS)
    sizes = {"max_context": 256, "max_batch": 4, "max_gamma": 8, "max_tree_nodes": 16}
    return export_bundle(
        target=target,
        draft=head,
        out=folder / "bundle",
        options=ExportOptions(**(sizes | options)),
        progress=lambda stage: None,
    )


@pytest.fixture(scope="module")
def bundle(tiny_checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(tiny_checkpoints[0], tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def pair(bundle: Bundle) -> Iterator[Pair]:
    opened = open_pair(bundle, max_batch=4, with_trees=True)
    yield opened
    opened.close()


@pytest.fixture
def target(pair: Pair) -> OnnxEngine:
    assert isinstance(pair.target, OnnxEngine)
    pair.target.trim([])
    return pair.target


def feed(slot: int, start: int, *tokens: int) -> Span:
    return Span(slot=slot, start=start, tokens=tokens, num_logits=0, num_settled=len(tokens))


def whole(engine: OnnxEngine) -> FloatArray:
    """Features of ``TEXT``, read at once in slot 0."""
    engine.extend([feed(0, 0, *TEXT)])
    return engine.features(0, 0, len(TEXT)).copy()


def test_a_bundle_says_that_it_has_a_head(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.requires == ("caches", "heads")
    assert manifest.draft is not None
    assert (manifest.target.gives_features, manifest.draft.reads_features) == (HIDDEN, HIDDEN)
    assert manifest.target.caches == ((2, 16), (2, 16), (1, HIDDEN // 2))
    assert "target/grouped.onnx" in manifest.files
    assert not [name for name in manifest.files if "device" in name]
    assert "draft is a head" in bundle.why_no_device(manifest.target, "9.0")
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.certificate["draft"]["head"]["max_difference"] < 1e-3
    assert max(manifest.certificate["target"]["features"]["of_greatest"].values()) < 1e-4


def test_a_manifest_whose_features_do_not_fit_is_refused(bundle: Bundle) -> None:
    manifest = bundle.manifest
    target, draft = manifest.target, manifest.draft
    assert draft is not None
    for changed, rule in (
        ({"requires": ("caches",)}, "requires' must have 'heads'"),
        ({"draft": replace(draft, reads_features=30)}, r"draft\.reads_features' must be 32"),
        ({"draft": None}, r"draft\.reads_features' must be 32"),
        ({"target": replace(target, gives_features=0)}, r"target\.caches' must end|reads_features"),
        ({"target": replace(target, gives_features=34)}, r"draft\.reads_features' must be 34"),
        ({"target": replace(target, reads_features=2)}, r"target\.reads_features' must be 0"),
    ):
        with pytest.raises(BundleError, match=rule):
            check_manifest(replace(manifest, **changed))


def test_a_head_is_opened_beside_its_target(bundle: Bundle, pair: Pair) -> None:
    assert isinstance(pair.draft, HeadEngine)
    with pytest.raises(BundleError, match="reads its target's features"):
        open_engine(bundle, "draft")


def test_features_have_the_same_bits_alone_in_a_batch_and_behind_a_rejection(
    target: OnnxEngine,
) -> None:
    """I1 and I2 hold for features."""
    wanted = whole(target)
    target.trim([])
    target.extend(
        [
            feed(0, 0, *TEXT[:1]),
            feed(1, 0, *TEXT[::-1]),
            feed(2, 0, *TEXT[:7]),
        ]
    )
    target.extend([feed(2, 7, *TEXT[7:9], 1, 1, 1)])
    target.extend([feed(1, 20, 9), feed(2, 9, *TEXT[9:])])
    assert np.array_equal(target.features(2, 0, len(TEXT)), wanted)
    assert np.array_equal(target.features(0, 0, 1), wanted[:1])
    assert not np.array_equal(target.features(1, 0, 20), wanted)


def test_features_go_with_their_text(target: OnnxEngine) -> None:
    """They are moved, copied out and back, and what nobody computed is zeros."""
    wanted = whole(target)
    target.move_slot(0, 3, 12)
    assert np.array_equal(target.features(3, 0, 12), wanted[:12])
    assert not target.features(3, 12, 20).any()
    assert not target.features(2, 0, 2000).any()
    kept = target.read_slot(0, 0, 16)
    target.write_slot(1, 0, kept)
    assert np.array_equal(target.features(1, 3, 16), wanted[3:16])


def test_features_of_a_trees_kept_path_are_those_of_its_chain(target: OnnxEngine) -> None:
    wanted = whole(target)
    target.extend([feed(1, 0, *TEXT[:10])])
    tree = (TEXT[10], 1, TEXT[11], 2, TEXT[12])
    target.extend([Span(slot=1, start=10, tokens=tree, num_logits=0, parents=(0, 0, 2, 2))])
    target.keep_path(1, (0, 2, 4))
    found = target.features(1, 0, 13)
    assert np.array_equal(found[:10], wanted[:10])
    np.testing.assert_allclose(found, wanted[:13], rtol=1e-3, atol=1e-4)


def drafts(pair: Pair, rows: int) -> list[int]:
    """What the head finds likeliest behind ``TEXT``, twice, in the last of so many slots."""
    assert pair.draft is not None
    for engine in (pair.target, pair.draft):
        engine.trim([])
        texts = [TEXT[: 4 + slot] for slot in range(rows - 1)] + [TEXT]
        spans = [feed(slot, 0, *text) for slot, text in enumerate(texts)]
        logits = engine.extend([replace(span, num_logits=1) for span in spans])
    found = []
    for place in range(2):
        found.append(int(logits[rows - 1, 0].argmax()))
        spans = [Span(slot=slot, start=0, tokens=(), num_logits=0) for slot in range(rows)]
        spans = [replace(span, start=len(text)) for span, text in zip(spans, texts, strict=True)]
        spans[-1] = Span(slot=rows - 1, start=len(TEXT) + place, tokens=(found[-1],), num_logits=1)
        logits = pair.draft.extend(spans)
    return found


def test_a_heads_drafts_do_not_depend_on_who_is_beside(pair: Pair) -> None:
    assert drafts(pair, 1) == drafts(pair, 3)
    assert pair.draft is not None
    # The ids that it has: of all others it knows nothing.
    pair.target.trim([])
    pair.draft.trim([])
    logits = pair.draft.extend([replace(feed(0, 0, 1, 2), num_logits=1)])
    assert int((logits[0, 0] > -1e29).sum()) == 100


@pytest.mark.parametrize("drafter", ["model", "suffix+model", "auto"])
def test_answers_with_a_head_are_those_without(drafter: str, pair: Pair) -> None:
    plain, drafted, harness = answers_with_and_without(pair, drafter, PROMPTS, MAX_TOKENS)
    assert drafted == plain
    reports = [harness.finished(name).report for name in harness.events]
    assert {report.off_reason for report in reports} == {None}
    assert sum(report.num_drafted for report in reports) > 10


def test_rows_go_on_plainly_where_the_head_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> FloatArray:
        raise EngineError("no")

    harness = Harness(target=pair.target, draft=pair.draft, max_batch=4)
    harness.submit("plain", PROMPTS[0], is_enabled=False, temperature=0.0, max_tokens=MAX_TOKENS)
    monkeypatch.setattr(HeadEngine, "extend", fail)
    harness.submit("failed", PROMPTS[0], gamma=3, temperature=0.0, max_tokens=MAX_TOKENS)
    harness.run()
    assert harness.tokens("failed") == harness.tokens("plain")
    assert harness.finished("failed").report.off_reason is not None


def test_the_law_of_answers_is_tested_with_the_bundles_own_head(bundle: Bundle) -> None:
    report = verify(bundle.root, num_samples=60, false_alarm=1e-6, seed=0)
    assert "pair, cascade" not in report.table()
    assert "pair, model" in report.table()
    assert report.has_passed


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_targets_of_other_families_serve_heads(family: str, weights: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    model = random_model(family, 256, vocab_size=VOCAB_SIZE, hidden_size=64)
    model.save_pretrained(target)
    write_tokenizer(target)
    made = export(target, tmp_path, weights=weights, max_tree_nodes=0)
    opened = open_pair(made, max_batch=4)
    try:
        test_answers_with_a_head_are_those_without("model", opened)
    finally:
        opened.close()


def test_features_of_another_layer_are_found_out(
    bundle: Bundle, tiny_checkpoints: tuple[Path, Path]
) -> None:
    """The certificate compares them with what Transformers returns, as it compares logits."""
    checkpoint = open_checkpoint(tiny_checkpoints[0], max_context=256).with_features(HIDDEN)
    part = head_beside(bundle.root.parent / "head", checkpoint)
    text, path = features_text(checkpoint.model_config), bundle.model_path(bundle.manifest.target)
    model = checkpoint.load()
    good = target_features(part, model, text)
    assert check_features(path, checkpoint.model_config, good)["of_greatest"]
    other = target_features(replace(part, taps=(1, 1, 1)), model, text)
    with pytest.raises(BundleError, match=r"target/model\.onnx: features differ by"):
        check_features(path, checkpoint.model_config, other)


def test_nothing_of_an_ended_texts_features_reaches_another(pair: Pair) -> None:
    """Trap: padding of a short row is what the call before left there, and 0 times NaN is NaN."""
    assert isinstance(pair.draft, HeadEngine)
    graph = pair.draft.engine
    ones = np.ones((8, HIDDEN), np.float32)

    def text(slot: int, length: int, value: float = 1.0) -> Span:
        return replace(feed(slot, 0, *TEXT[:length]), num_logits=1, features=ones[:length] * value)

    graph.trim([])
    wanted = graph.extend([text(0, 2), text(1, 8)]).copy()
    graph.trim([])
    graph.extend([text(2, 8, np.nan), text(3, 8, np.nan)])
    graph.trim([])
    assert np.array_equal(graph.extend([text(0, 2), text(1, 8)]), wanted)


def test_calls_of_a_head_share_one_buffer(pair: Pair) -> None:
    assert isinstance(pair.draft, HeadEngine)
    graph = pair.draft.engine
    assert isinstance(graph, OnnxEngine)
    for length in range(2, 12):
        graph.extend([replace(feed(0, 0, *TEXT[:length]), num_logits=1)])
    kept = [call for call in graph._calls._calls.values() if isinstance(call, PaddedCall)]
    memory = graph._calls._features
    assert kept
    assert memory.shape[1] < 4 * 16
    for call in kept:
        assert call.features is not None
        assert call.recycled is not None
        assert np.shares_memory(call.features, memory)
        assert np.shares_memory(call.recycled, memory)


MUTANTS = {
    "padding keeps what was there": (
        "            self.features[row, len(span.tokens) :] = 0\n",
        "",
        test_nothing_of_an_ended_texts_features_reaches_another,
    ),
    "calls own their features": (
        "            features, recycled = (\n                one[",
        "            features, recycled = (\n                one.copy()[",
        test_calls_of_a_head_share_one_buffer,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> None:
    old, new, killer = MUTANTS[name]

    def caught() -> None:
        opened = open_pair(bundle, max_batch=4)
        try:
            killer(opened)
        finally:
            opened.close()

    assert_caught(monkeypatch, calls, old, new, caught)
