"""Where the tokens of a call stand, told to graphs that do not work it out."""

import numpy as np

from engines.bundle import CACHE_COLUMNS, POSITIONS
from engines.place_inputs import PlaceInputs, place_feeds


def test_tokens_stand_one_behind_the_other_and_padding_within_the_model() -> None:
    feeds = place_feeds(np.array([0, 7, 9]), 3, capacity=12, last_position=9)
    np.testing.assert_array_equal(feeds[POSITIONS], [[0, 1, 2], [7, 8, 9], [9, 9, 9]])
    np.testing.assert_array_equal(feeds[CACHE_COLUMNS], np.arange(12))


def test_a_call_is_filled_in_place_again_and_again() -> None:
    places = PlaceInputs.empty(2, 2, capacity=8, last_position=7)
    bound = places.feeds()[POSITIONS]
    for start in (3, 1):
        places.fill_row(0, start)
        places.fill_row(1, start + 2)
        np.testing.assert_array_equal(bound, [[start, start + 1], [start + 2, start + 3]])
