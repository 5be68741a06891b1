"""Every query of the dashboard and of the alerts finds something: by names here, by Prometheus itself with --long."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.serving.observability.queries import (
    ALERTS,
    alerts,
    dashboard,
    dashboard_queries,
    grouping_of,
    metrics_of,
    targets,
    value_of,
)
from tests.runtime.watched import Watched, free_port

# What Prometheus itself adds to each sample, and to each target.
OF_PROMETHEUS = {"instance", "job"}
QUERIES = [*dashboard_queries(), *map(value_of, alerts())]


@pytest.fixture(scope="module")
def samples(watched: Watched) -> dict[str, list[dict[str, str]]]:
    """Labels of the samples of a server after traffic, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(watched.scrape()):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    found["up"] = [{"job": "outrider"}]
    return dict(found)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_and_labels_that_a_server_has(query: str, samples):
    labels = set(OF_PROMETHEUS)
    for name, matchers in metrics_of(query):
        assert name in samples, name
        labels.update(*samples[name])
        for label, operator, value in matchers:
            known = {one.get(label) for one in samples[name]}
            assert known != {None}, f"{name} has no label {label}"
            if operator == "=" and value != "$model_name":
                assert value in known, f"{name}: no {label} {value}"
    assert grouping_of(query) <= labels


def test_a_misspelt_query_is_noticed(samples):
    for query in ("rate(outrider_request_total[5m])", 'outrider_slots{model="$model_name"}'):
        with pytest.raises(AssertionError):
            test_a_query_names_metrics_and_labels_that_a_server_has(query, samples)


def test_legends_name_labels_that_their_queries_keep():
    for query, legend in targets():
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            is_grouped = re.search(r"\bsum\b", query) is not None
            assert not is_grouped or label in grouping_of(query), legend


def test_the_dashboard_is_one_file_that_any_grafana_takes():
    board = dashboard()
    assert board["uid"] == "outrider-server"
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "outrider_build_info" in variables["model_name"]["definition"]
    panels = [one for one in board["panels"] if one["type"] != "row"]
    assert len({one["id"] for one in board["panels"]}) == len(board["panels"])
    assert len({one["title"] for one in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('model_name="$model_name"' in one["expr"] for one in panel["targets"])
    places = [tuple(one["gridPos"].values()) for one in board["panels"]]
    assert len(set(places)) == len(places)


def test_alerts_have_a_severity_and_say_where():
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in alert["annotations"]["summary"]
    assert len({one["alert"] for one in alerts()}) == len(alerts())


CONFIG = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: ["{rules}"]
scrape_configs:
  - job_name: outrider
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""
VLLM_QUERIES = (
    'vllm:num_requests_running{model_name="$model_name"}',
    "histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[30s])))",
    "histogram_quantile(0.99, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[30s])))",
    'sum by (finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[30s]))',
    'vllm:kv_cache_usage_perc{model_name="$model_name"}',
    'rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"}[30s])',
)
LIMIT_S = 60.0


class Prometheus:
    """A running Prometheus that scrapes one server."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **given: str) -> dict:
        url = f"{self._root}/{path}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def result(self, query: str) -> list[dict]:
        return self.get("query", query=query)["result"]


@contextmanager
def scraping(metrics_port: int, folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=ALERTS, port=metrics_port))
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(30)


def wait_for(found: list[str], what: str, query: str, prometheus: Prometheus, until_s: float):
    """Ask until there is an answer, or the time is over: then ``found`` gets what was asked."""
    while time.monotonic() < until_s:
        try:
            if prometheus.result(query):
                return
        except OSError:
            pass  # it starts
        time.sleep(0.5)
    found.append(what)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is missing")
def test_prometheus_finds_something_for_every_query(watched: Watched, tmp_path: Path):
    (model_name,) = set(re.findall(r'build_info\{model_name="([^"]+)"', watched.scrape()))
    empty: list[str] = []
    with scraping(watched.metrics_port, tmp_path) as prometheus:
        until_s = time.monotonic() + LIMIT_S
        wait_for(empty, "no scrape", 'up{job="outrider"} == 1', prometheus, until_s)
        # Between two scrapes, so that there are rates.
        watched.ask()
        for query in (*QUERIES, *VLLM_QUERIES):
            asked = query.replace("$model_name", model_name).replace("$__rate_interval", "30s")
            wait_for(empty, query, asked, prometheus, time.monotonic() + LIMIT_S)
        rules = prometheus.get("rules")["groups"][0]["rules"]
        stored = prometheus.get("label/__name__/values")
    assert not empty
    assert "vllm:time_to_first_token_seconds_bucket" in stored
    assert [one["name"] for one in rules] == [one["alert"] for one in alerts()]
    assert {one["health"] for one in rules} == {"ok"}
    print(f"{len(QUERIES) + len(VLLM_QUERIES)} queries, none empty")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus is missing")
def test_promtool_finds_nothing_to_complain_of(watched: Watched):
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    # Colons in names are vLLM's, and for recording rules only.
    ours = "".join(f"{line}\n" for line in watched.scrape().splitlines() if "vllm:" not in line)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr
