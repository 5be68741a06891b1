"""What a scrape is told: our names and vLLM's, of the same counters, with the model on each sample."""

from __future__ import annotations

import re

import pytest
from outrider.runtime.serving.observability.metrics import Metrics
from outrider.runtime.serving.observability.scrape_collector import OLDER, SAME, ScrapeCollector
from outrider.runtime.serving.security.access import Security
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.serving.security.metrics_listener import OPENMETRICS, at, get, listening

VLLM_ONLY = {"request_success", "kv_cache_usage_perc", "cache_config_info"}


def told(exposition: ScrapeCollector, headers: dict[str, str] = OPENMETRICS) -> str:
    """The text that a scraper gets who asks for another format."""
    with listening(Security(), collector=exposition) as listener:
        return get(at(listener), headers)[2]


async def test_vllm_s_metrics_are_ours_under_its_names(start):
    async with start() as run:
        async for _ in run.client.generate("abc", max_tokens=9, temperature=0.0):
            pass
        text = told(ScrapeCollector(run.server.metrics.registry, "letters", has_vllm_names=True))
    found = {one.name: one for one in text_string_to_metric_families(text)}
    theirs = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    # There is no cache of prefixes on scripted engines.
    here = {name for name in SAME if not name.startswith("prefix_cache")}
    assert theirs == here | {*OLDER.values()} | VLLM_ONLY
    for name in here:
        ours, alias = found[f"outrider_{name}"], found[f"vllm:{name}"]
        assert (ours.type, ours.documentation) == (alias.type, alias.documentation)
        assert [one.value for one in ours.samples] == [one.value for one in alias.samples]
        assert {one.labels["engine"] for one in alias.samples} == {"0"}
    assert {one.labels["model_name"] for each in found.values() for one in each.samples} == {
        "letters"
    }
    ended = {
        one.labels["finished_reason"]: one.value for one in found["vllm:request_success"].samples
    }
    assert ended == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert found["vllm:kv_cache_usage_perc"].samples[0].value == 0.0
    config = found["vllm:cache_config_info"].samples[0].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("4200", "4")


async def test_slots_that_are_taken_are_the_share_of_the_cache(start_endless):
    async with start_endless() as run:
        stream = run.endless()
        await anext(stream)
        exposition = ScrapeCollector(run.server.metrics.registry, "m", has_vllm_names=True)
        families = {one.name: one for one in exposition.collect()}
        assert families["vllm:kv_cache_usage_perc"].samples[0].value == pytest.approx(0.25)
        await stream.aclose()


def test_before_a_model_is_open_there_is_no_cache_to_tell_of():
    metrics = Metrics()
    names = {
        one.name for one in ScrapeCollector(metrics.registry, "m", has_vllm_names=True).collect()
    }
    assert "vllm:request_success" in names and "vllm:kv_cache_usage_perc" not in names


async def test_counters_say_so_in_their_names_and_nothing_else_does(start):
    async with start() as run:
        text = told(ScrapeCollector(run.server.metrics.registry, "m"), {})
    assert "vllm:" not in text and "_created" not in text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert len(kinds) > 40
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert re.fullmatch(r"outrider_[a-z0-9_]+", name)


def test_what_is_no_model_s_name_gets_no_label():
    metrics = Metrics()
    (one,) = [
        metric
        for metric in ScrapeCollector(metrics.registry).collect()
        if metric.name == "outrider_requests_admitted"
    ]
    assert [sample.labels for sample in one.samples] == [{}]
