"""What a config file may say of the application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outrider.runtime.addons.ray.options import parse_args
from outrider.runtime.core.config import PREFIX_CACHE_BYTES
from outrider.runtime.core.drafting import HistoryScope
from outrider.runtime.core.errors import ConfigError


def test_arguments_reach_the_application_and_its_servers() -> None:
    options, served = parse_args(
        {"bundle": "/models/pair", "max_replicas": 3, "num_cpus": 4, "max_running": 8, "default_gamma": 2,
         "costs": "/var/costs", "drain_timeout_s": 5}
    )  # fmt: skip
    assert (options.bundle, options.max_replicas, options.num_cpus) == ("/models/pair", 3, 4.0)
    assert (served.config.max_running, served.config.default_gamma) == (8, 2)
    assert served.config.drain_timeout_s == 5.0 and served.costs_folder == Path("/var/costs")
    assert served.leaves_drafter and not served.leaves_gamma
    assert not options.trusts_tenants


def test_prefixes_are_kept_as_serve_keeps_them_unless_it_is_said() -> None:
    _, served = parse_args({"bundle": "b", "prefix_cache_scope": "server"})
    assert served.config.prefix_cache_bytes == PREFIX_CACHE_BYTES
    assert served.config.prefix_cache_scope is HistoryScope.SERVER
    _, served = parse_args({"bundle": "b", "prefix_cache_bytes": 0})
    assert served.config.prefix_cache_bytes == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "bundle: is required"),
        ({"bundle": ""}, "bundle: must be a folder"),
        ({"bundle": "b", "max_runing": 8}, "max_runing: must be one of "),
        ({"bundle": "b", "lb_delay_s": 1.0}, "lb_delay_s: must be one of "),
        ({"bundle": 3}, "bundle: must be a text"),
        ({"bundle": "b", "max_running": "8"}, "max_running: must be a whole number"),
        ({"bundle": "b", "max_running": True}, "max_running: must be a whole number"),
        ({"bundle": "b", "trusts_tenants": 1}, "trusts_tenants: must be true or false"),
        ({"bundle": "b", "num_cpus": "2"}, "num_cpus: must be a number"),
        ({"bundle": "b", "num_gpus": -1.0}, "num_gpus: must be at least 0"),
        ({"bundle": "b", "min_replicas": 2}, "min_replicas: must be at least 1, and at most"),
        ({"bundle": "b", "prefix_cache_scope": "all"}, "prefix_cache_scope: must be one of "),
        ({"bundle": "b", "prefix_cache_scope": 5}, "prefix_cache_scope: must be one of "),
        ({"bundle": "b", "prefix_cache_scope": "request"}, "prefix_cache_scope: must be tenant or"),
        ({"bundle": "b", "max_running": 0}, "max_running: must be "),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_args(args)
    assert str(refused.value).startswith(message)
