"""One frame of ``outrider top``: what two scrapes of a server's metrics say of the time between them. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from outrider.runtime.gamma.verdicts import verdict_words
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples of one scrape.

    Attributes:
        at_s: when it was read, monotonic seconds.
        samples: by name, the labels and value of each.
    """

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of ``outrider_NAME`` with these labels; NaN where there is none."""
        found = [
            value
            for given, value in self.samples.get(f"outrider_{name}", ())
            if all(given.get(key) == wanted for key, wanted in labels.items())
        ]
        return math.fsum(found) if found else math.nan

    def label(self, name: str, label: str) -> str:
        """Return a label of the first sample whose value is not 0; empty where there is none."""
        found = self.samples.get(f"outrider_{name}", ())
        return next((labels.get(label, "") for labels, value in found if value), "")


def parse_scrape(text: str, at_s: float) -> Scrape:
    """Return the samples of a text of Prometheus.

    Raises:
        ValueError: it is none.
    """
    samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    return Scrape(at_s, dict(samples))


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two scrapes."""

    before: Scrape
    now: Scrape

    def grown(self, name: str, **labels: str) -> float:
        """Return what a counter has grown by; from 0 where it is new, or the server began anew."""
        now, before = self.now.value(name, **labels), self.before.value(name, **labels)
        return now if math.isnan(before) or before > now else now - before

    def rate(self, name: str, **labels: str) -> float:
        """Return what a counter grew by per second."""
        return _ratio(self.grown(name, **labels), self.now.at_s - self.before.at_s)

    def ratio(self, name: str, other: str, **labels: str) -> float:
        """Return what a counter grew by over what another one did; ``labels`` are of the first."""
        return _ratio(self.grown(name, **labels), self.grown(other))

    def quantile(self, name: str, share: float) -> float:
        """Return the value below which a share of a histogram's new observations lie; NaN without any.

        Within a bucket values are taken to be spread evenly, and beyond the last bound to be that, as Prometheus does.
        """
        bounds = [labels["le"] for labels, _ in self.now.samples.get(f"outrider_{name}_bucket", ())]
        counts = [(float(one), self.grown(f"{name}_bucket", le=one)) for one in bounds]
        wanted = share * counts[-1][1] if counts else 0.0
        if not wanted > 0.0:
            return math.nan
        low = below = 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return math.nan


def frame(window: Window) -> RenderableType:
    """Return what a terminal shows of a server."""
    now = window.now
    title = Text.assemble(
        ("outrider top  ", "bold"),
        now.label("build_info", "model_name"),
        f"  {now.label('build_info', 'version')}  ",
        (now.label("engine_state", "state"), "bold"),
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column(style="dim")
        table.add_column(justify="right", min_width=22)
    nothing = ("", "")
    for left, right in zip_longest(_requests(window), _speculation(window), fillvalue=nothing):
        table.add_row(*left, *right)
    return Group(title, table)


def _requests(window: Window) -> Iterable[tuple[str, str]]:
    now, slots = window.now, window.now.value("slots")
    yield (
        "requests running, of slots",
        f"{_number(now.value('num_requests_running'))} of {_number(slots)}",
    )
    yield "waiting", _number(now.value("num_requests_waiting"))
    yield "ended per s", _number(window.rate("requests_finished_total"))
    yield "refused per s", _number(window.rate("requests_refused_total"))
    yield "answer tokens per s", _number(window.rate("generation_tokens_total"))
    yield "prompt tokens per s", _number(window.rate("prompt_tokens_total"))
    yield "first token, 50 and 95 of 100", _times(window, "time_to_first_token_seconds")
    yield "per token", _times(window, "inter_token_latency_seconds")
    yield "queue", _times(window, "request_queue_time_seconds")


def _speculation(window: Window) -> Iterable[tuple[str, str]]:
    now, drafts = window.now, "spec_decode_num_drafts_total"
    per_round = window.ratio("spec_decode_num_accepted_tokens_total", drafts)
    first = window.ratio("spec_decode_num_accepted_tokens_per_pos_total", drafts, position="0")
    kept = _ratio(now.value("kv_cache_tokens"), now.value("kv_cache_capacity_tokens"))
    found = window.ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
    yield "speed over plain decoding", _number(now.value("control_speed_up"))
    yield "alpha, of first draft tokens", _share(first)
    yield "tokens per round that drafted", _number(1.0 + per_round)
    yield "steps per s", _number(window.rate("engine_steps_total"))
    yield "a step", _times(window, "engine_step_seconds")
    yield "cache taken", _share(kept)
    yield "prompt tokens found in the cache", _share(found)
    yield "event loop late", _times(window, "loop_lag_seconds")
    yield "engine restarts", _number(now.value("engine_restarts_total"))
    for labels, value in now.samples.get("outrider_control_alpha", ()):
        least = now.value("control_least_alpha", **labels)
        alpha, needed = (None if math.isnan(one) else one for one in (value, least))
        drafter = labels["drafter"]
        yield "verdict", verdict_words(drafter, alpha, needed)


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.nan


def _times(window: Window, name: str) -> str:
    return " / ".join(_seconds(window.quantile(name, share)) for share in (0.5, 0.95))


def _seconds(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{value * 1000.0:.1f} ms" if value < 1.0 else f"{value:.1f} s"


def _number(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _share(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.0%}"
