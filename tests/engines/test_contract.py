from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from outrider.engines.base import Engine, EngineError, EngineLimits, FloatArray, Span
from outrider.engines.bundle.bundle import Bundle, load_bundle
from outrider.engines.determinism import has_equal_bits
from outrider.engines.opening import open_engine
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.reference.torch_engine import TorchEngine, open_checkpoint
from transformers import T5Config, T5ForConditionalGeneration

from tests.engines.contract import EngineContract, MakeEngine, extend_one, span, wanted_logits
from tests.engines.handmade import write_bundle
from tests.engines.handmade_sources import write_source_bundle
from tests.engines.source_contract import MAX_SOURCE, NUM_SLOTS, SourceContract, SourceTests, source
from tests.engines.state_contract import MAX_OPEN, StateContract
from tests.engines.tree_contract import TreeContract

V = 11


def scripted_logits(prefix: tuple[int, ...]) -> FloatArray:
    """A row that depends on every token of the prefix and on its place."""
    weighed = sum((place + 1) * (token + 1) for place, token in enumerate(prefix))
    return np.sin(weighed * np.arange(1, V + 1)).astype(np.float32)


class TestScripted(TreeContract):
    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        limits = EngineLimits(
            max_batch=3, max_context=32, max_extend=9, vocab_size=V, max_tree_nodes=9
        )
        return lambda: ScriptedEngine(scripted_logits, limits)


class TestScriptedWithStates(StateContract):
    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        limits = EngineLimits(
            max_batch=3, max_context=32, max_extend=9, vocab_size=V, max_open=MAX_OPEN
        )
        return lambda: ScriptedEngine(scripted_logits, limits)


class TestTorch(TreeContract):
    atol = branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, tiny_checkpoints: tuple[Path, Path]) -> MakeEngine:
        return lambda: open_checkpoint(
            tiny_checkpoints[0], max_batch=3, max_context=33, max_extend=9, max_tree_nodes=9
        )


SOURCE_LIMITS = EngineLimits(
    max_batch=NUM_SLOTS,
    max_context=32,
    max_extend=9,
    vocab_size=V,
    max_tree_nodes=9,
    max_source=MAX_SOURCE,
)


def scripted_answer(tokens: tuple[int, ...], prefix: tuple[int, ...]) -> FloatArray:
    """A row that depends on every token of the source and of the prefix, and on its place."""
    return scripted_logits(prefix) + np.float32(scripted_logits(tokens)[0])


class TestScriptedWithSources(TreeContract, SourceContract):
    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return lambda: ScriptedEngine(scripted_answer, SOURCE_LIMITS)

    def test_a_scripted_failure_of_a_read_takes_source_and_text(self) -> None:
        engine = ScriptedEngine(scripted_answer, SOURCE_LIMITS)
        engine.fail_reads_at(1)
        engine.read([source(0, (2, 3)), source(1, (4,))])
        engine.extend([span(0, 0, (1, 2)), span(1, 0, (1,))])
        with pytest.raises(EngineError, match="scripted failure of read 1"):
            engine.read([source(0, (3,))])
        assert (engine.source_of(0), engine.tokens_of(0)) == ((), ())
        assert (engine.source_of(1), engine.tokens_of(1)) == ((4,), (1,))
        assert engine.num_reads == 2
        engine.fail_at(1)
        with pytest.raises(EngineError, match="scripted failure of extend 1"):
            engine.extend([span(1, 1, (5,))])
        assert (engine.source_of(1), engine.tokens_of(1)) == ((4,), ())


class TestDecoderAloneReadsNothing:
    def test_reads_are_refused(self) -> None:
        limits = EngineLimits(max_batch=3, max_context=32, max_extend=9, vocab_size=V)
        engine = ScriptedEngine(scripted_logits, limits)
        with pytest.raises(EngineError, match="no encoder"):
            engine.read([source(0, (1,))])
        with pytest.raises(EngineError, match="no source"):
            engine.share_source(0, [1])


def random_t5() -> torch.nn.Module:
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class TestTorchWithSources(SourceTests):
    atol = 1e-5

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        model = random_t5()
        return lambda: TorchEngine(model, SOURCE_LIMITS)

    def test_tokens_of_a_tree_answer_as_chains(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3)), source(1, (2, 3))])
        tree = Span(slot=0, start=0, tokens=(1, 2, 3, 4), num_logits=4, parents=(0, 0, 1))
        found = wanted_logits(empty, [tree])[0]
        for node, chain in enumerate([(1,), (1, 2), (1, 3), (1, 2, 4)]):
            self.assert_same(found[node], extend_one(empty, 1, 0, chain)[-1])


@pytest.mark.parametrize("which", ["target", "draft"])
class TestOnnx(TreeContract):
    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, which: str) -> MakeEngine:
        bundle = load_bundle(tiny_bundle)
        return lambda: open_engine(bundle, which, max_batch=3, with_trees=True)


@pytest.mark.parametrize(("which", "graph"), [("target", "grouped"), ("draft", "model")])
class TestOnnxSources(TreeContract, SourceContract):
    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(
        self,
        tiny_text2text_bundle: Path,
        monkeypatch: pytest.MonkeyPatch,
        which: Literal["target", "draft"],
        graph: str,
    ) -> MakeEngine:
        bundle = load_bundle(tiny_text2text_bundle)
        if graph == "model":
            monkeypatch.setattr(Bundle, "host_path", Bundle.model_path)
        return lambda: open_engine(bundle, which, with_trees=True)

    def test_a_tree_is_gone_with_its_text(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3)), source(1, (2, 3))])
        trees = [
            Span(slot=slot, start=0, tokens=(1, 2, 3), num_logits=3, parents=(0, 0))
            for slot in range(2)
        ]
        empty.extend(trees)
        empty.share_source(0, [1])
        empty.read([source(0, (3,))])
        for slot in range(2):
            with pytest.raises(EngineError, match=f"slot {slot}"):
                empty.keep_path(slot, (0, 1))

    def test_trees_that_want_no_logits_are_cached(self, empty: Engine) -> None:
        empty.read([source(0, (2, 3)), source(1, (2, 3))])
        empty.extend([Span(slot=0, start=0, tokens=(1, 2, 3), num_logits=0, parents=(0, 0))])
        empty.keep_path(0, (0, 2))
        expected = extend_one(empty, 1, 0, (1, 3, 4))
        found = extend_one(empty, 0, 2, (4,))
        np.testing.assert_allclose(found[0], expected[2], rtol=0.0, atol=self.branch_atol)

    def test_packed_rows_are_those_of_the_graph(self, make_engine: MakeEngine, graph: str) -> None:
        assert make_engine().packs_rows == (graph == "grouped")

    def test_bits_are_equal_in_all_shapes(self, make_engine: MakeEngine) -> None:
        assert has_equal_bits(make_engine())

    def test_answers_are_those_of_the_checkpoint(
        self,
        make_engine: MakeEngine,
        tiny_text2text_checkpoints: tuple[Path, Path],
        which: str,
    ) -> None:
        checkpoint = tiny_text2text_checkpoints[which == "draft"]
        sizes = {"max_batch": 8, "max_context": 128, "max_extend": 32, "max_source": 96}
        engines = [make_engine(), open_checkpoint(checkpoint, **sizes)]
        lengths, counts = (96, 1, 30, 2), (9, 30, 1, 5)
        found = []
        for engine in engines:
            sources = [self.make_source(count, seed=count) for count in lengths]
            engine.read([source(slot, tokens) for slot, tokens in enumerate(sources)])
            texts = [self.make_text(count, seed=count) for count in counts]
            found.append(
                wanted_logits(engine, [span(row, 0, text) for row, text in enumerate(texts)])
            )
        for mine, expected in zip(*found, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0.0, atol=1e-4)


@pytest.fixture(scope="module")
def handmade(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(write_bundle(tmp_path_factory.mktemp("handmade") / "bundle"))


class TestOnnxHandmade(EngineContract):
    @pytest.fixture
    def make_engine(self, handmade: Bundle) -> MakeEngine:
        return lambda: open_engine(handmade, "target")


@pytest.fixture(scope="module")
def handmade_sources(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(write_source_bundle(tmp_path_factory.mktemp("sources") / "bundle"))


class TestOnnxHandmadeSources(SourceContract):
    @pytest.fixture
    def make_engine(self, handmade_sources: Bundle) -> MakeEngine:
        return lambda: open_engine(handmade_sources, "target")
