"""What a scrape is told: the counters with the model's name on each sample, and vLLM's names for them where wanted.

A server serves one model, so that the name says nothing new beside the scrape's target. It is there since dashboards of
several servers choose by it, as vLLM's do, without a join for each query. Nothing is counted twice: vLLM's metrics are
made of ours at each scrape.
"""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM = "vllm:"
OURS = "outrider_"
ENGINE = {"engine": "0"}
"""vLLM numbers its engines; a server of ours has one."""

SAME = (
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens",
    "generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
"""Metrics of the same name and meaning."""
OLDER = {"inter_token_latency_seconds": "time_per_output_token_seconds"}
"""Ours, and what dashboards of older versions call it."""
Values: TypeAlias = Mapping[tuple[tuple[str, str], ...], float]
"""By labels."""
FINISHED_REASONS = {"stop_token": "stop", "stop_string": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class ScrapeCollector(Collector):
    """Collects what a scrape of a server is told.

    Attributes:
        counters: the server's own metrics.
        model_name: label of every sample; empty for none.
        has_vllm_names: whether vLLM's names are told besides.
    """

    counters: Collector
    model_name: str = ""
    has_vllm_names: bool = False

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, ours first."""
        labels = {"model_name": self.model_name} if self.model_name else {}
        found = [*self.counters.collect()]
        for metric in found:
            yield _copied(metric, metric.name, labels)
        if self.has_vllm_names:
            for metric in _of_vllm({one.name: one for one in found}):
                yield _copied(metric, metric.name, labels | ENGINE)


def _of_vllm(ours: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield vLLM's metrics, without the labels that all of them have."""
    for name in SAME:
        if (metric := ours.get(f"{OURS}{name}")) is not None:
            yield _copied(metric, f"{VLLM}{name}", {})
            if name in OLDER:
                yield _copied(metric, f"{VLLM}{OLDER[name]}", {})
    finished = ours[f"{OURS}requests_finished"]
    yield _of_values(
        "request_success", "counter", finished.documentation, _by_reason(finished.samples)
    )
    if f"{OURS}slots" not in ours:
        return  # no model is open yet
    num_slots, num_free, capacity = (
        ours[f"{OURS}{name}"].samples[0].value
        for name in ("slots", "slots_free", "kv_cache_capacity_tokens")
    )
    # A slot is taken whole: what is free of it is nobody else's.
    used: Values = {(): 1.0 - num_free / num_slots}
    yield _of_values("kv_cache_usage_perc", "gauge", "Share of the slots that are taken", used)
    size = (
        ("block_size", f"{capacity / num_slots:.0f}"),
        ("num_gpu_blocks", f"{num_slots:.0f}"),
    )
    yield _of_values("cache_config_info", "gauge", "Slots, as blocks of the cache", {size: 1.0})


def _by_reason(samples: Iterable[Sample]) -> Values:
    """Return the requests that ended by vLLM's reason."""
    sums: Sums[str] = Sums(dict.fromkeys(("stop", "length", "abort", "error"), 0))
    for sample in samples:
        if sample.name.endswith("_total"):
            code, reason = sample.labels["code"], sample.labels["reason"]
            other = "abort" if code == "CANCELLED" else "error"
            sums[FINISHED_REASONS.get(reason, other)] += int(sample.value)
    return {(("finished_reason", reason),): count for reason, count in sums.items()}


def _of_values(name: str, kind: str, text: str, values: Values) -> Metric:
    """Return a metric of vLLM's with values by labels."""
    metric = Metric(f"{VLLM}{name}", text, kind)
    suffix = "_total" if kind == "counter" else ""
    for labels, value in values.items():
        metric.add_sample(f"{VLLM}{name}{suffix}", dict(labels), value)
    return metric


def _copied(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """Return a metric under a name, with further labels, and without the times at which its counters were made."""
    copied = Metric(name, metric.documentation, metric.type)
    copied.samples = [
        sample._replace(
            name=f"{name}{sample.name.removeprefix(metric.name)}",
            labels={**sample.labels, **labels},
        )
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return copied
