from __future__ import annotations

import pytest
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.errors import ConfigError


def test_the_defaults_are_those_of_the_contract() -> None:
    config = ServerConfig()
    assert (config.max_running, config.max_queued, config.max_queued_tokens) == (64, 256, 262_144)
    assert (config.queue_timeout_s, config.drain_timeout_s, config.lb_delay_s) == (30.0, 30.0, 5.0)
    assert (config.default_gamma, config.default_drafter) == (None, "model")
    assert config.max_unsent_chunks == 2048


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_running", 0),
        ("prefill_chunk", 0),
        ("max_unsent_chunks", 0),
        ("num_threads", -1),
        ("max_queued", -1),
        ("max_connections", 0),
        ("max_queued_tokens", -1),
        ("default_gamma", -1),
        ("queue_timeout_s", -0.1),
        ("drain_timeout_s", float("nan")),
        ("lb_delay_s", -1.0),
        ("retry_after_s", -1.0),
        ("stall_timeout_s", 0.0),
        ("default_drafter", ""),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerConfig(**{key: value})
    assert refusal.value.key == key
    assert refusal.value.rule in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lookup_min_ngram", 0),
        ("lookup_max_ngram", 1),
        ("datastore_max_match", 1),
        ("min_prob", 1.5),
        ("min_prob", float("nan")),
        ("suffix_factor", 0.0),
        ("pool_size", 0),
        ("max_scopes", 0),
        ("phrase_length", 17),
        ("num_phrases", 17),
        ("root_phrases", 17),
    ],
)
def test_a_drafting_value_out_of_range_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        DraftingConfig(**{key: value})
    assert refusal.value.key == key
