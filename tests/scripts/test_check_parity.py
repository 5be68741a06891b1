"""A long context is as close to PyTorch as a short one."""

from pathlib import Path

import pytest

from scripts.check_parity import FAMILIES, TAIL, measure


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_512_tokens_of_context_answer_as_pytorch_does(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    found, bound = measure(family, 512, tmp_path)
    assert found.max_difference <= bound.value < 1e-4
    assert found.num_compared == 2 * (512 + sum(TAIL))
    assert found.num_greedy_equal == found.num_compared
