"""Our graphs against those of optimum-onnx, which another exporter made of another Transformers."""

import pytest

from scripts.second_reference.compare import FAMILIES, MOST_DIFFERENCE, compare, second_python


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_our_graphs_answer_as_those_of_optimum_onnx(family: str) -> None:
    python = second_python()
    if python is None:
        pytest.skip("no .venv-optimum-onnx: bash scripts/second_reference/setup")
    found = compare(family, python)
    assert found.difference <= MOST_DIFFERENCE
    assert found.num_greedy_equal == found.num_compared
