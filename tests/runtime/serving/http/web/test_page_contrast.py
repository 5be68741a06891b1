"""Every text of the page is legible in light and dark: WCAG 2.2, contrast of 4.5 to 1 (success criterion 1.4.3)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STYLE = Path(__file__).parents[5] / "runtime" / "serving" / "http" / "web" / "style.css"
KINDS = ("accepted", "recovered", "bonus", "forced", "rejected")
# Text, ground, and how opaque the text is.
PAIRS = [
    ("text", "page", 1.0),
    ("text", "panel", 1.0),
    ("muted", "page", 1.0),
    ("muted", "panel", 1.0),
    *((kind, f"{kind}-fill", 1.0) for kind in KINDS),
    ("accepted", "panel", 1.0),
    ("rejected", "panel", 1.0),
]
FADED = ("rejected", "behind")

Colour = tuple[float, ...]


def themes() -> dict[str, dict[str, Colour]]:
    """Colours by name, in light and dark."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text("utf-8"), re.DOTALL)
    return {"light": colours(light), "dark": colours(dark)}


def colours(block: str) -> dict[str, Colour]:
    return {name: colour(text) for name, text in re.findall(r"--([\w-]+): (#\w{6});", block)}


def colour(text: str) -> Colour:
    return tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))


def luminance(one: Colour) -> float:
    """Relative luminance, as WCAG defines it for sRGB."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in one]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(text: Colour, ground: Colour, opacity: float = 1.0) -> float:
    seen = tuple(opacity * t + (1 - opacity) * g for t, g in zip(text, ground, strict=True))
    low, high = sorted((luminance(seen), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(theme: str):
    named = themes()[theme]
    found = {(text, ground): contrast(named[text], named[ground], o) for text, ground, o in PAIRS}
    found["white", "button"] = contrast(colour("#ffffff"), named["button"])
    assert {pair: value for pair, value in found.items() if value < 4.5} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_drafts_that_have_faded_can_still_be_read(theme: str):
    named = themes()[theme]
    (opacity,) = re.findall(
        r"\.rejected, \.behind \{[^}]*opacity: ([\d.]+);", STYLE.read_text("utf-8")
    )
    found = {kind: contrast(named[kind], named["page"], float(opacity)) for kind in FADED}
    assert {kind: value for kind, value in found.items() if value < 4.5} == {}


def test_every_kind_of_token_has_a_line_of_its_own():
    style = STYLE.read_text("utf-8")
    lines = [
        re.search(rf"\.{kind} \{{[^}}]*text-decoration: underline (\w+)", style)
        for kind in KINDS[:4]
    ]
    assert len({line.group(1) for line in lines if line}) == 4


def test_black_on_white_is_21_and_grey_is_less():
    white = colour("#ffffff")
    assert contrast(colour("#000000"), white) == pytest.approx(21.0)
    assert contrast(colour("#000000"), white, 0.5) < 4.5
