import json
from dataclasses import replace

import pytest
from outrider.engines.base import BundleError, EngineError
from outrider.engines.bundle.files import FileEntry
from outrider.engines.bundle.manifest import Manifest, ModelEntry
from outrider.engines.bundle.manifest_rules import check_manifest
from outrider.engines.bundle.plans import (
    Machine,
    PlanEntry,
    Profile,
    Range,
    Shape,
    derive_profiles,
    profile_for,
    rows_of_longest,
    why_unfit,
)

PROFILES = derive_profiles(max_batch=64, max_extend=512, max_gamma=8, gamma=4)
PLAN = PlanEntry(
    path="plans/rtx-1-sm80/target.plan",
    part="target",
    flavour="rtx",
    version="1",
    compute_capability="8.0",
    precision="float16",
    capacity=1536,
    profiles=PROFILES,
)


def test_profiles_follow_from_the_limits() -> None:
    assert (
        Profile(name="step", batch=Range(1, 8, 64), tokens=Range(1, 1, 2), wanted=Range(1, 1, 2)),
        Profile(name="verify", batch=Range(1, 8, 64), tokens=Range(2, 5, 9), wanted=Range(1, 5, 9)),
        Profile(
            name="prefill", batch=Range(1, 1, 1), tokens=Range(1, 128, 512), wanted=Range(1, 1, 512)
        ),
    ) == PROFILES


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"max_batch": 1, "max_extend": 2, "max_gamma": 0, "gamma": 4}, ["step", "prefill"]),
        (
            {"max_batch": 3, "max_extend": 2, "max_gamma": 1, "gamma": 9},
            ["step", "verify", "prefill"],
        ),
        (
            {"max_batch": 3, "max_extend": 9, "max_gamma": 8, "gamma": 0},
            ["step", "verify", "prefill"],
        ),
    ],
)
def test_every_range_of_narrow_limits_ascends(limits: dict[str, int], names: list[str]) -> None:
    profiles = derive_profiles(**limits)
    assert [profile.name for profile in profiles] == names
    for profile in profiles:
        for axis in (profile.batch, profile.tokens, profile.wanted):
            assert 1 <= axis.least <= axis.tuned <= axis.most


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Shape(1, 1, 1), "step"),
        (Shape(64, 2, 2), "step"),
        (Shape(64, 3, 1), "verify"),
        (Shape(2, 9, 9), "verify"),
        (Shape(1, 10, 1), "prefill"),
        (Shape(1, 512, 512), "prefill"),
    ],
)
def test_the_narrowest_profile_that_holds_a_shape_is_taken(shape: Shape, name: str) -> None:
    assert PROFILES[profile_for(PROFILES, shape)].name == name


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(65, 1, 1), r"profile step: batch 65 is outside 1\.\.64"),
        (Shape(2, 10, 1), r"verify: tokens 10 is outside 2\.\.9; profile prefill: batch 2 is"),
        (Shape(1, 513, 1), r"profile prefill: tokens 513 is outside 1\.\.512"),
        (Shape(1, 0, 1), r"profile step: tokens 0 is outside 1\.\.2"),
    ],
)
def test_a_shape_outside_every_profile_is_refused_by_name(shape: Shape, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        profile_for(PROFILES, shape)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"flavour": "tensorrt"}, "built for flavour rtx, this machine has tensorrt"),
        ({"version": "2"}, "built for version 1, this machine has 2"),
        ({"compute_capability": "9.0"}, "built for compute capability 8.0, this machine has 9.0"),
    ],
)
def test_a_plan_of_another_machine_is_left_aside_with_the_reason(
    changed: dict[str, str], reason: str
) -> None:
    found = why_unfit(PLAN, Machine("rtx", "1", "8.0")._replace(**changed))
    assert found.endswith(reason)
    assert bool(found) == bool(reason)


def manifest(**changed: object) -> dict[str, object]:
    model = ModelEntry(
        path="target", num_layers=1, num_kv_heads=1, head_size=8, vocab_size=9, weights="float32"
    )
    whole = Manifest(
        target=model,
        draft=None,
        max_context=8,
        max_batch=1,
        max_gamma=1,
        max_extend=8,
        eos_token_ids=(),
        bos_token_id=None,
        files={PLAN.path: FileEntry(sha256="0" * 64, size=1)},
        plans=(PLAN,),
    )
    return json.loads(whole.to_json()) | changed


def test_plans_survive_the_manifest() -> None:
    assert Manifest.from_json(json.dumps(manifest())).plans == (PLAN,)


def test_a_manifest_from_before_plans_has_none() -> None:
    fields = manifest()
    del fields["plans"]
    assert Manifest.from_json(json.dumps(fields)).plans == ()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"plans": 3}, "'plans': Expected `array`"),
        ({"plans": [3]}, r"plans\[0\]': Expected `object`"),
        ({"plans": [{"path": 3}]}, r"plans\[0\]\.path': Expected `str`"),
    ],
)
def test_a_broken_plan_entry_is_named(broken: dict[str, object], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        Manifest.from_json(json.dumps(manifest(**broken)))


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1, 3], [1, 2, 3, 4], "123"])
def test_a_broken_range_is_named(sizes: object) -> None:
    fields = manifest()
    fields["plans"][0]["profiles"][1]["tokens"] = sizes
    rule = (
        r"plans\[0\]\.profiles\[1\]\.tokens': Expected `array`|tokens of a profile of .* ascending"
    )
    with pytest.raises(BundleError, match=rule):
        check_manifest(Manifest.from_json(json.dumps(fields)))


def test_prompts_share_a_call_where_the_profile_of_the_longest_spans_has_the_rows() -> None:
    assert rows_of_longest(PROFILES) == 1
    wide = replace(PROFILES[-1], batch=Range(1, 1, 4))
    assert rows_of_longest((*PROFILES[:-1], wide)) == 4
