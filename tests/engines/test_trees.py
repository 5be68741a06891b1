import numpy as np
import pytest
from outrider.engines.base import EngineError
from outrider.engines.trees import chain_length, check_parents, check_path, path_to, tree_layout

# A root, a chain of two behind it, and two phrases behind that: ALGORITHMS' example of a mask.
PHRASES = (0, 1, 2, 3, 2, 5)


def test_layout_of_two_phrases_behind_a_draft() -> None:
    layout = tree_layout(PHRASES)
    assert layout.depths.tolist() == [0, 1, 2, 3, 4, 3, 4]
    rows = ["".join("01"[seen] for seen in row[1:]) for row in layout.ancestors.tolist()[1:]]
    assert rows == ["100000", "110000", "111000", "111100", "110010", "110011"]
    assert layout.ancestors[:, 0].all()


def test_a_chain_is_the_simple_tree() -> None:
    layout = tree_layout((0, 1, 2))
    np.testing.assert_array_equal(layout.ancestors, np.tril(np.ones((4, 4), bool)))
    assert layout.depths.tolist() == [0, 1, 2, 3]
    assert tree_layout(()).ancestors.tolist() == [[True]]


def test_layouts_are_shared_and_read_only() -> None:
    assert tree_layout(PHRASES) is tree_layout(PHRASES)
    with pytest.raises(ValueError, match="read-only"):
        tree_layout(PHRASES).ancestors[0, 1] = True


@pytest.mark.parametrize("parents", [(1,), (-1,), (0, 2), (0, 0, 3)])
def test_a_parent_stands_before_its_child(parents: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="the parent of token"):
        check_parents(parents)


def test_paths_go_down_edge_by_edge() -> None:
    check_path(path_to(6, PHRASES), PHRASES)
    assert path_to(6, PHRASES) == (0, 1, 2, 5, 6)
    for path in ((), (1,), (0, 2), (0, 1, 2, 3, 6), (0, 7), (0, 0)):
        with pytest.raises(EngineError, match="path:"):
            check_path(path, PHRASES)


@pytest.mark.parametrize(
    ("parents", "length"), [((), 1), ((0, 1, 2), 4), (PHRASES, 5), ((0, 0), 2), ((0, 0, 2), 2)]
)
def test_leading_chain(parents: tuple[int, ...], length: int) -> None:
    assert chain_length(parents) == length
