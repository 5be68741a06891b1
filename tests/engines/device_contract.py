"""The engine contract for a bundle on a device; scripts/gpu_check.py gives the engines."""

import pytest

from engines.base import Engine
from tests.engines.contract import EngineContract, MakeEngine
from tests.engines.tree_contract import TreeContract

# Of logits up to some 10, in 16 bits on a device; a wrong token or position moves them by 1.
ATOL = 0.1


class TestDevice(EngineContract):
    atol = ATOL


class TestTrees(TreeContract):
    atol = branch_atol = ATOL

    @pytest.fixture
    def engine(self, make_tree_engine: MakeEngine) -> Engine:
        engine = make_tree_engine()
        if not engine.limits.max_tree_nodes:
            engine.close()
            pytest.skip("this engine takes no trees: its bundle has none, or no plans for them")
        return engine
