"""The benchmark of doors: each part measures what it says, shortly."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.doors import authentication
from scripts.bench.doors.authentication import checks, servers
from scripts.bench.doors.papers import Papers
from scripts.bench.doors.shares import hopeless, quotas
from scripts.bench.doors.swap import swaps


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"), num_keys=3)


def test_those_who_are_known_are_let_in_and_nobody_else(papers: Papers) -> None:
    let_in = {row.case["kind"]: row.figures["let_in"] for row in checks(papers, 2)}
    assert let_in == {"key": 2, "jwt": 2, "mtls": 2, "wrong key": 0, "no key": 0}


def test_servers_with_doors_are_asked(
    papers: Papers, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "BESIDE", {"mtls": "mtls"})
    (row,) = servers(tiny_bundle, papers, num_calls=16, rounds=1)
    assert (row.figures["calls"], row.figures["added_ms"]) == (16, 0.0)


def test_certificates_are_swapped_under_calls(papers: Papers, tiny_bundle: Path) -> None:
    (row,) = swaps(tiny_bundle, papers, num_swaps=1)
    assert (row.figures["certificates_seen"], row.figures["failed"]) == (2, 0)
    assert row.figures["calls"] > 0


def test_a_flood_gets_its_quota(tiny_bundle: Path, tmp_path: Path) -> None:
    row = quotas(tiny_bundle, tmp_path, seconds=0.5, max_tokens=8, max_running=2)
    assert 0 < row.figures["got"] < row.figures["asked"]
    assert row.figures["other_completed"] == row.figures["other_asked"]


def test_hopeless_deadlines_are_told_apart(tiny_bundle: Path) -> None:
    row = hopeless(tiny_bundle, num_probes=2, max_tokens=100)
    assert row.figures["refused"] or row.figures["others"]
