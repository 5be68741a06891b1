from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import EngineLimits, FloatArray
from outrider.engines.bundle.manifest import Bundle, load_bundle
from outrider.engines.opening import open_engine
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.reference.torch_engine import open_checkpoint

from tests.engines.contract import EngineContract, MakeEngine
from tests.engines.handmade import write_bundle
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


class TestTorch(TreeContract):
    atol = branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, tiny_checkpoints: tuple[Path, Path]) -> MakeEngine:
        return lambda: open_checkpoint(
            tiny_checkpoints[0], max_batch=3, max_context=33, max_extend=9, max_tree_nodes=9
        )


@pytest.mark.parametrize("which", ["target", "draft"])
class TestOnnx(TreeContract):
    branch_atol = 1e-5

    @pytest.fixture
    def make_engine(self, tiny_bundle: Path, which: str) -> MakeEngine:
        bundle = load_bundle(tiny_bundle)
        return lambda: open_engine(bundle, which, max_batch=3, with_trees=True)


@pytest.fixture(scope="module")
def handmade(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(write_bundle(tmp_path_factory.mktemp("handmade") / "bundle"))


class TestOnnxHandmade(EngineContract):
    @pytest.fixture
    def make_engine(self, handmade: Bundle) -> MakeEngine:
        return lambda: open_engine(handmade, "target")
