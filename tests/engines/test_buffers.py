"""Arrays written one by one hold what was written, for those who know them already."""

import numpy as np
import pytest
from outrider.engines.buffers import TokenArrays, int64_view


def test_elements_are_written_in_order() -> None:
    array = np.zeros((2, 3), dtype=np.int64)
    view = int64_view(array)
    for at in range(6):
        view[at] = at - 2**40
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3) - 2**40)


def test_tokens_of_any_length() -> None:
    arrays = TokenArrays(3)
    for tokens in ((7, 8, 9), (), [5], (6, 4), (1,)):
        found = arrays.of(tokens)
        assert (found.dtype, found.tolist()) == (np.int64, list(tokens))
    with pytest.raises(IndexError):
        arrays.of((1, 2, 3, 4))
