"""Settings of drafters from a command line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.runtime.core.drafting import (
    GONE_SETTINGS,
    DraftingConfig,
    parse_settings,
    setting_names,
)
from outrider.runtime.core.errors import ConfigError


def test_settings_have_the_kind_of_their_default() -> None:
    texts = ["draft_lenience=1", "draft_window=4", "harvests_rejected=false"]
    found = parse_settings(texts)
    assert found == {"draft_lenience": 1.0, "draft_window": 4, "harvests_rejected": False}
    assert isinstance(found["draft_lenience"], float)
    config = DraftingConfig(**found)
    assert (config.draft_lenience, config.draft_window, config.harvests_rejected) == (1.0, 4, False)
    assert parse_settings([]) == {}


@pytest.mark.parametrize("name", GONE_SETTINGS)
def test_a_setting_that_is_gone_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: is gone since 0.3: .*; leave it out"):
        parse_settings(["pool_size=4", f"{name}=4"])
    assert name not in setting_names()


def test_every_switch_of_ouroboros_is_a_setting() -> None:
    wanted = {"phrase_draft", "draft_window", "draft_lenience", "draft_passes", "num_phrases"}
    assert wanted | {"harvests_rejected", "root_phrases"} <= set(setting_names())
    assert not {"datastore", "history_scope"} & set(setting_names())


def test_a_preset_stands_for_settings_and_those_beside_it_win() -> None:
    paper = DraftingConfig(**parse_settings(["preset=paper"]))
    assert paper == DraftingConfig(
        phrase_length=6, num_phrases=3, pool_size=20, draft_window=20, draft_passes=0,
        draft_lenience=1.0, root_phrases=0,
    )  # fmt: skip
    assert DraftingConfig(**parse_settings(["preset=outrider"])) == DraftingConfig()
    for texts in (["preset=paper", "draft_window=3"], ["draft_window=3", "preset=paper"]):
        assert DraftingConfig(**parse_settings(texts)) == replace(paper, draft_window=3)


@pytest.mark.parametrize(
    ("texts", "key"),
    [
        (["psychic=1"], "drafting"),
        (["datastore=x"], "drafting"),
        (["draft_window"], "draft_window"),
        (["draft_window=1.5"], "draft_window"),
        (["draft_lenience=much"], "draft_lenience"),
        (["harvests_rejected=yes"], "harvests_rejected"),
        (["draft_window=1", "draft_window=2"], "draft_window"),
        (["preset=thesis"], "preset: must be one of outrider, paper"),
        (["preset=paper", "preset=outrider"], "preset: must be given once"),
    ],
)
def test_impossible_settings_are_refused_by_name(texts: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_settings(texts)
