"""Trees are as large as what they cost beside the rows of a step allows, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.engines.base import EngineLimits
from outrider.runtime.calibration.store import table_from_json, table_to_json
from outrider.runtime.gamma.costs import CostTable, ModelCosts
from outrider.runtime.gamma.tree_prices import TreePrices, affordable_nodes

from tests.runtime.gamma.test_controller import table

LIMITS = EngineLimits(max_batch=4, max_context=64, max_extend=16, vocab_size=4, max_tree_nodes=11)


def costs(*, slope_of_trees: float | None = 0.05) -> CostTable:
    """Chains: a tenth of a step per token. Trees of n rows: n times ``slope_of_trees`` per token."""
    chains = table(slope=0.1)
    if slope_of_trees is None:
        return chains
    return replace(
        chains,
        trees=ModelCosts(
            batches=(1, 4),
            tokens=(1, 11),
            seconds=((1.0, 1.0 + 10 * slope_of_trees), (1.0, 1.0 + 40 * slope_of_trees)),
            capacity=128,
            position_s=0.0,
        ),
    )


def test_a_nodes_price_is_that_of_a_pass_over_trees_of_as_many_rows() -> None:
    prices = TreePrices(costs(), 24, LIMITS, packs_rows=False)
    assert prices.of_step([3]) == pytest.approx(0.05)
    assert prices.of_step([3, 2, 1, 4]) == pytest.approx(0.2)
    # Where trees were not measured, chains are the best there is.
    chains = TreePrices(costs(slope_of_trees=None), 8, LIMITS, packs_rows=False)
    assert chains.of_step([3]) == pytest.approx(0.1)


def test_rows_without_drafts_pay_for_the_trees_of_others_where_rows_are_not_packed() -> None:
    prices = TreePrices(costs(), 24, LIMITS, packs_rows=False)
    assert prices.of_step([3, 0, None, 0]) == pytest.approx(4 * 0.2)
    assert prices.of_step([3, 0, 2, 0]) == pytest.approx(2 * 0.2)


def test_packed_rows_pay_for_a_second_pass_but_not_for_the_width_of_trees() -> None:
    """Ten nodes of n trees add n times 0.5 to a step of 1.0, and the pass of their own 1.0 where others have theirs."""
    prices = TreePrices(costs(), 24, LIMITS, packs_rows=True)
    assert prices.of_step([3]) == pytest.approx(0.05)
    assert prices.of_step([3, 2, 1, 4]) == pytest.approx(0.2)
    assert prices.of_step([3, 0, None, 0]) == pytest.approx(4 * (0.5 + 1.0) / 10)
    assert prices.of_step([3, 0, 2, 0]) == pytest.approx(2 * (1.0 + 1.0) / 10)


@pytest.mark.parametrize(
    ("max_nodes", "gamma", "node_cost", "expected"),
    [
        (24, 4, 0.0, 24),
        (24, 4, 0.1, 24),
        (24, 4, 0.25, 16),  # of sixteen, one path of four pays for all
        (24, 4, 0.7, 5),
        (24, 4, 1.0, 0),  # four nodes are a chain
        (24, 4, 9.0, 0),
        (4, 4, 0.1, 0),
        (0, 4, 0.1, 0),
        (24, 0, 0.1, 0),
    ],
)
def test_no_tree_costs_more_than_a_whole_path_of_it_brings(
    max_nodes: int, gamma: int, node_cost: float, expected: int
) -> None:
    assert affordable_nodes(max_nodes, gamma, node_cost) == expected


def test_a_table_with_trees_is_kept_whole() -> None:
    for one in (costs(), costs(slope_of_trees=None)):
        assert table_from_json(table_to_json(one)) == one
