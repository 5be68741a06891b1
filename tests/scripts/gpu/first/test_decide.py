"""Which defaults follow from what was found, rule by rule."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.first.decide import as_toml, decide, merged

ROUNDS = {"has_passed": True, "device_step_s": 2e-3, "host_step_s": 4e-3}
STEP = {"part": "target", "batch": 1, "tokens": 1, "device_s": 1e-3}
FOUND: dict[str, Any] = {
    "contract": {"has_passed": True},
    "steps": {"has_passed": True},
    "kernels": {"num_equal": 114, "num_compared": 114},
    "rounds": ROUNDS,
    "rounds without graphs": ROUNDS | {"device_step_s": 7e-3},
    "times": {"timings": [STEP]},
    "any attention": {"has_passed": True, "timings": [STEP | {"device_s": 0.99e-3}]},
    "pair": {"speeds": [{"speedup": 1.4, "batch": 1, "gamma": 4}]},
}
DEFAULTS = {
    "device": "auto",
    "sampler": "auto",
    "gamma": "auto",
    "provider_options": {"enable_cuda_graph": 1},
}


def settings(found: dict[str, Any]) -> dict[str, Any]:
    return tomllib.loads(as_toml(decide(found)))


def test_a_card_on_which_all_is_well_keeps_the_defaults() -> None:
    assert settings(FOUND) == DEFAULTS


@pytest.mark.parametrize(
    ("part", "change", "setting"),
    [
        ("steps", {"has_passed": False}, {"device": "cpu"}),
        ("kernels", {"num_equal": 113}, {"sampler": "host"}),
        ("rounds", {"host_step_s": 1.9e-3}, {"sampler": "host"}),
        ("rounds", {"host_step_s": 1.95e-3}, {}),
        (
            "rounds without graphs",
            {"device_step_s": 1e-3},
            {"provider_options": {"enable_cuda_graph": 0}},
        ),
        ("rounds without graphs", {"has_passed": False}, {"provider_options": None}),
        (
            "any attention",
            {"timings": [STEP | {"device_s": 0.9e-3}]},
            {"provider_options": {"enable_cuda_graph": 1, "sdpa_kernel": 0}},
        ),
        (
            "any attention",
            {"timings": [STEP | {"device_s": 0.9e-3}], "has_passed": False},
            {},
        ),
        ("pair", {"speeds": [{"speedup": 0.9, "batch": 1, "gamma": 2}]}, {"gamma": 0}),
    ],
)
def test_a_figure_changes_its_setting_alone(
    part: str, change: dict[str, Any], setting: dict[str, Any]
) -> None:
    expected = {name: value for name, value in (DEFAULTS | setting).items() if value is not None}
    assert settings(FOUND | {part: FOUND[part] | change}) == expected


def test_recorded_rounds_that_fail_are_not_recorded_and_not_served() -> None:
    failed = FOUND | {"rounds": ROUNDS | {"has_passed": False}}
    assert settings(failed)["device"] == "cpu"
    assert settings(failed)["provider_options"] == {"enable_cuda_graph": 0}


def test_what_was_not_found_decides_nothing(tmp_path: Path) -> None:
    assert settings({}) == {}
    files = []
    for number, part in enumerate(("contract", "steps")):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"found": {part: FOUND[part]}}))
    assert settings(merged(files)) == {"device": "auto"}
