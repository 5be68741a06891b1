"""The queries that ``packaging`` ships for dashboards and alerts, and the names in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PACKAGING = Path(__file__).parents[4] / "packaging"
DASHBOARD = PACKAGING / "grafana" / "dashboard.json"
ALERTS = PACKAGING / "prometheus" / "alerts.yml"
_METRIC = re.compile(r"\b(outrider_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)")
# An alert is VALUE OPERATOR BOUND.
_COMPARISON = re.compile(r"^(.*?)\s*[<>]\s*[\d.]+\s*$", re.S)


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def targets() -> Iterator[tuple[str, str]]:
    """Query and legend of every line of every panel."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def dashboard_queries() -> list[str]:
    return [query for query, _ in targets()]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def value_of(alert: Mapping[str, Any]) -> str:
    """The value that an alert compares with its bound."""
    found = _COMPARISON.match(alert["expr"])
    assert found is not None, alert["alert"]
    return found[1]


def metrics_of(query: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The metrics of a query with their matchers: label, operator, value."""
    return [(name, _MATCHER.findall(matchers)) for name, matchers in _METRIC.findall(query)]


def grouping_of(query: str) -> set[str]:
    """Labels that a query groups or joins by."""
    return {label.strip() for group in _BY.findall(query) for label in group.split(",")} - {""}
