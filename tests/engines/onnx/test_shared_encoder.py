"""A draft over the target's encoder: the contract, the bits of a draft with its own, and slots that move in between."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError, Engine, FloatArray, Source
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.bundle.encoder_decoder import CROSS_FILE, ENCODE_FILE
from outrider.engines.determinism import has_equal_bits
from outrider.engines.onnx.engine import OnnxEngine
from outrider.engines.onnx.sources import OnnxSources
from outrider.engines.opening import open_engine, open_pair
from outrider.engines.pair import source_memory

from tests.engines.contract import MakeEngine, extend_one, span, wanted_logits
from tests.engines.handmade_sources import write_draft, write_source_bundle
from tests.engines.source_contract import SourceContract, source

TEXT = (5, 6, 7)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = write_source_bundle(tmp_path_factory.mktemp("shared") / "bundle")
    assert write_draft(root)
    return load_bundle(root)


@pytest.fixture
def reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is never asked for a source again."""

    def fail(*args: object) -> FloatArray:
        raise AssertionError("a source was read twice")

    monkeypatch.setattr(OnnxSources, "_answer", fail)


class Behind(OnnxEngine):
    """A draft behind a target, which reads every source first."""

    def __init__(self, bundle: Bundle) -> None:
        assert bundle.manifest.draft is not None
        self.target = OnnxEngine(bundle, bundle.manifest.target)
        super().__init__(bundle, bundle.manifest.draft, beside=self.target)

    def read(self, sources: Sequence[Source]) -> None:
        self.target.read(sources)
        super().read(sources)


class TestOfWhatTheTargetRead(SourceContract):
    @pytest.fixture
    def make_engine(self, bundle: Bundle, reads_once: None) -> MakeEngine:
        return lambda: Behind(bundle)

    def test_bits_are_equal_in_all_shapes(self, make_engine: MakeEngine) -> None:
        assert has_equal_bits(make_engine())


class TestWithoutTheTargetsRead(SourceContract):
    @pytest.fixture
    def make_engine(self, bundle: Bundle) -> MakeEngine:
        target = open_engine(bundle, "target")
        return lambda: open_engine(bundle, "draft", beside=target)


def make_source(count: int, seed: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(0, 31, count))


def answers(engine: Engine, sources: Sequence[Sequence[int]]) -> list[FloatArray]:
    engine.read([source(slot, tokens) for slot, tokens in enumerate(sources)])
    return wanted_logits(engine, [span(slot, 0, TEXT) for slot in range(len(sources))])


def test_answers_are_those_of_models_with_their_own(bundle: Bundle, tmp_path: Path) -> None:
    sources = [make_source(count, seed=count) for count in (33, 1, 2, 64, 7)]
    pair = open_pair(bundle)
    assert pair.draft is not None
    plain = load_bundle(write_source_bundle(tmp_path / "plain"))
    expected = answers(open_engine(plain, "target"), sources)
    np.testing.assert_array_equal(answers(pair.target, sources), expected)
    alone = answers(open_engine(bundle, "draft"), sources)
    np.testing.assert_array_equal(answers(pair.draft, sources), alone)
    assert np.abs(np.array(alone) - np.array(expected)).max() > 1e-3
    pair.close()


def test_slots_may_move_before_the_draft_reads(
    bundle: Bundle, request: pytest.FixtureRequest
) -> None:
    """Read in slots 0 to 2; slot 0 goes, 2 takes its place, and 1 is shared with 3."""
    sources = [make_source(count, seed=count) for count in (4, 9, 70)]
    alone = answers(open_engine(bundle, "draft"), sources)
    pair = open_pair(bundle)
    target, draft = pair.target, pair.draft
    assert draft is not None
    request.getfixturevalue("reads_once")
    target.read([source(slot, tokens) for slot, tokens in enumerate(sources)])
    target.move_slot(2, 0, 0)
    target.share_source(1, [3])
    target.trim([0, 0, None, 0])
    draft.read([source(0, sources[2]), source(1, sources[1])])
    draft.read([source(3, sources[1])])
    for slot, row in ((0, 2), (1, 1), (3, 1)):
        np.testing.assert_array_equal(extend_one(draft, slot, 0, TEXT), alone[row])
    pair.close()


def test_a_source_that_the_target_has_not_is_read_again(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of slots whose source is another, was moved over or has gone; the target's stay as they are."""
    calls: list[int] = []
    answer = OnnxSources._answer

    def counted(self: OnnxSources, sources: Sequence[Source], num_tokens: int) -> FloatArray:
        calls.append(len(sources))
        return answer(self, sources, num_tokens)

    tokens, other = make_source(5, seed=1), make_source(5, seed=2)
    (alone,) = answers(open_engine(bundle, "draft"), [tokens])
    pair = open_pair(bundle)
    target, draft = pair.target, pair.draft
    assert draft is not None
    monkeypatch.setattr(OnnxSources, "_answer", counted)
    target.read([source(0, other), source(1, tokens), source(2, tokens)])
    expected = wanted_logits(target, [span(0, 0, TEXT)])[0]
    target.move_slot(0, 1, 0)
    target.trim([0, 0, None])
    for slot in range(3):
        draft.read([source(slot, tokens)])
        np.testing.assert_array_equal(extend_one(draft, slot, 0, TEXT), alone)
    assert calls == [1, 1, 1]
    for slot in range(2):
        np.testing.assert_array_equal(extend_one(target, slot, 0, TEXT), expected)
    pair.close()


@pytest.mark.parametrize("changed", ["embedding", "q", "k", "v", "o", "last_norm"])
def test_another_constant_of_the_encoder_is_not_shared(tmp_path: Path, changed: str) -> None:
    root = write_source_bundle(tmp_path / "bundle")
    before = (root / "target" / ENCODE_FILE).read_bytes()
    assert not write_draft(root, changed=changed)
    assert (root / "target" / ENCODE_FILE).read_bytes() == before
    assert not (root / "draft" / CROSS_FILE).exists()
    pair = open_pair(load_bundle(root))
    assert pair.draft is not None
    answers(pair.draft, [make_source(3, seed=1)])
    pair.close()


def test_a_target_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    root = write_source_bundle(tmp_path / "bundle")
    untold = (root / "target" / ENCODE_FILE).read_bytes()
    assert write_draft(root)
    bundle = load_bundle(root)
    (root / "target" / ENCODE_FILE).write_bytes(untold)
    target = OnnxEngine(bundle, bundle.manifest.target)
    assert bundle.manifest.draft is not None
    with pytest.raises(
        BundleError, match=r"draft/cross.onnx: .*encode.onnx has no output 'hidden'"
    ):
        OnnxEngine(bundle, bundle.manifest.draft, beside=target)


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("target", '"shares_encoder": false', '"shares_encoder": true'),
        ("draft", '"hidden_size": 64', '"hidden_size": 65'),
    ],
)
def test_a_manifest_that_shares_what_it_cannot_is_refused(
    tmp_path: Path, part: str, old: str, new: str
) -> None:
    root = write_source_bundle(tmp_path / "bundle")
    assert write_draft(root)
    path = root / "manifest.json"
    text = path.read_text(encoding="utf-8")
    at = text.index(f'"{part}": {{')
    assert old in text[at:]
    path.write_text(text[:at] + text[at:].replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BundleError, match=f"{part}.source.shares_encoder' must be false"):
        load_bundle(root)


def test_memory_of_what_is_kept_is_told(bundle: Bundle) -> None:
    # 2 layers, keys and values of 4 heads of 16 floats, and a width of 64.
    assert "1.0 KiB of target and 1.2 KiB of draft in a slot" in source_memory(bundle, 4)
