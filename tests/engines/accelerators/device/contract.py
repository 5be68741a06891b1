"""The engine contract for a bundle on a device; scripts/gpu/check.py gives the engines."""

import pytest
from outrider.engines.base import Engine, Span

from tests.engines.contract import EngineContract
from tests.engines.tree_contract import TreeContract


class TestDevice(TreeContract):
    # Of logits up to some 10, in 16 bits on a device; a wrong token or position moves them by 1.
    atol = branch_atol = 0.1

    @pytest.fixture(autouse=True)
    def skip_trees_where_none_are_taken(
        self, request: pytest.FixtureRequest, engine: Engine
    ) -> None:
        is_of_trees = not hasattr(EngineContract, request.node.originalname)
        if is_of_trees and not engine.limits.max_tree_nodes:
            pytest.skip("this engine takes no trees: its bundle has none, or no plans for them")

    def broken_spans(self, engine: Engine) -> list[tuple[list[Span], str]]:
        suite = TreeContract if engine.limits.max_tree_nodes else EngineContract
        return suite.broken_spans(self, engine)
