"""Fields that know their options: how values are made from what is given, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import (
    Option,
    Panel,
    build,
    check_bounds,
    converted,
    limit,
    named_of,
    options_of,
    part,
    setting,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait.

    Attributes:
        wait_s: seconds.
    """

    wait_s: float = 1.0

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ConfigError("wait_s", "must be at least 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Painter:
    """A class of settings with one of each kind."""

    num_brushes: int = setting(3, Panel.ENGINES, "Brushes.", option="brushes", bounds=(1, 9))
    colour: Colour = setting(Colour.RED, Panel.ENGINES, "Colour.")
    coats: tuple[str, ...] = setting(("a", "b"), Panel.ENGINES, "Coats.")
    size: int = setting(1, Panel.ENGINES, "Size.", offered=None)
    area: int = converted(
        1,
        lambda given: given["width"] * given["height"],
        width=Option(Panel.ADDRESSES, "Width.", int, 2),
        height=Option(Panel.ADDRESSES, "Height.", int, 3),
    )
    is_large: bool = converted(False, lambda given: given["width"] > 9)
    dry_s: float | None = limit(None, "Seconds to dry.", (0, 60))
    patience: Patience = part(
        Patience, "limits", "patience_", limit=Option(Panel.LIMITS, "A limit.", table="limits")
    )
    untold: str = "untold"

    def __post_init__(self) -> None:
        check_bounds(self)


DEFAULTS = {name: one.default for name, one in options_of(Painter)}


def painter(tables: dict[str, dict[str, Any]] | None = None, **given: Any) -> Painter:
    return build(Painter, DEFAULTS | given, tables or {})


def test_options_have_the_types_and_the_defaults_of_fields():
    kinds = {name: (one.kind, one.default) for name, one in options_of(Painter)}
    assert kinds["brushes"] == (int, 3)
    assert kinds["colour"] == (str, "red")
    assert kinds["coats"] == (str, "a,b")
    assert kinds["size"] == (int, None)
    assert kinds["width"] == (int, 2)
    assert [*kinds][-1] == "limit"


def test_an_option_of_none_leaves_the_field_s_default():
    assert painter() == Painter(area=6)
    assert painter(size=2).size == 2


def test_values_are_made_from_options():
    made = painter(brushes=4, colour="blue", coats="c", width=10)
    assert (made.num_brushes, made.colour, made.coats) == (4, Colour.BLUE, ("c",))
    assert (made.area, made.is_large) == (30, True)


def test_a_table_holds_limits_and_the_fields_of_parts():
    made = painter({"limits": {"dry_s": 5.0, "patience_wait_s": 2.0}})
    assert (made.dry_s, made.patience.wait_s) == (5.0, 2.0)
    found = {one.name: (one.value, one.kind, one.field) for one in named_of(made, "limits")}
    assert found == {
        "dry_s": (5.0, Painter, "dry_s"),
        "patience_wait_s": (2.0, Patience, "wait_s"),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"brushes": 0}, "num_brushes: must be at least 1"),
        ({"brushes": 10}, "num_brushes: must be at most 9"),
        ({"colour": "green"}, "colour: must be one of red, blue"),
        ({"tables": {"limits": {"dry_s": -1.0}}}, "dry_s: must be at least 0 seconds"),
        ({"tables": {"limits": {"dry_s": float("nan")}}}, "dry_s: must be at least 0 seconds"),
        ({"tables": {"limits": {"dry_s": 61.0}}}, "dry_s: must be at most 60"),
        (
            {"tables": {"limits": {"patience_wait_s": -1.0}}},
            "patience_wait_s: must be at least 0 seconds",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_it_is_given_by(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        painter(**given)
