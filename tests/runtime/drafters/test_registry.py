"""Drafters by name: the project's, those of other packages, and what is composed of them."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import pytest
from outrider.runtime.core.drafting import GONE, Part, check_drafter, parse_drafter, without_gone
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.drafters.base import DrafterCapabilities
from outrider.runtime.drafters.compose import MAX_COMPOSED
from outrider.runtime.drafters.registry import DRAFTER_NAMES, REGISTRY, tuned_drafter
from outrider.runtime.drafters.text.lookup import LookupDrafter
from outrider.runtime.gamma.acceptance import MOST_GROUPS

from tests.runtime.gamma.test_controller import table
from tests.runtime.markov import Harness

DOCS = Path(__file__).parents[3] / "docs" / "drafters.md"


def install(folder: Path, name: str, entries: str, source: str) -> None:
    """A package as pip would leave it: a module and its metadata."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[outrider.drafters]\n{entries}\n")


def documented_example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    return code


def test_the_documented_drafter_is_found_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = documented_example()
    assert len(source.splitlines()) <= 42
    install(tmp_path, "acme_documented", "successor = acme_documented:SuccessorDrafter", source)
    monkeypatch.syspath_prepend(tmp_path)
    harness = Harness("F3")
    assert "successor" in harness.worker.drafter_names
    assert "successor" in harness.worker.guesser_names
    prompt = [*range(10), 0]
    harness.submit("plain", prompt, max_tokens=21, is_enabled=False)
    for name in ("successor", "model/successor", "successor+model"):
        harness.submit(name, prompt, max_tokens=21, drafter=name, gamma=4)
    harness.run()
    for name in ("successor", "model/successor", "successor+model"):
        assert harness.tokens(name) == harness.tokens("plain")
    report = harness.finished("successor").report
    assert report.num_steps == 4
    assert report.num_accepted == report.num_drafted == 16


def test_a_foreign_drafter_that_raises_costs_nobody_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = documented_example().replace("chain: list[int] = []", "raise ValueError")
    install(tmp_path, "acme_raising", "raising = acme_raising:SuccessorDrafter", source)
    monkeypatch.syspath_prepend(tmp_path)
    harness = Harness("F3")
    harness.submit("a", drafter="raising", gamma=3)
    harness.submit("b", drafter="model", gamma=3)
    harness.submit("c", drafter="model/raising", gamma=3)
    harness.run()
    assert harness.tokens("a") == harness.tokens("b") == harness.tokens("c")
    assert harness.finished("a").report.off_reason == "DEGRADED"
    assert harness.finished("b").report.off_reason is None
    assert harness.finished("b").report.num_accepted > 0
    assert harness.finished("c").report.off_reason == "DEGRADED"


@pytest.mark.parametrize("bad", ["(-1,)", "(10,)", "(4, 99, 5)", "tuple(range(4, 40))"])
def test_impossible_drafts_are_cut_before_they_are_fed(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = documented_example().replace("return tuple(chain)", f"return {bad}")
    install(tmp_path, "acme_impossible", "impossible = acme_impossible:SuccessorDrafter", source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "acme_impossible", raising=False)
    harness = Harness("F3")
    harness.submit("plain", is_enabled=False)
    harness.submit("a", drafter="impossible", gamma=3)
    harness.submit("b", drafter="model/impossible", gamma=3)
    harness.run()
    assert harness.tokens("a") == harness.tokens("b") == harness.tokens("plain")


def test_a_draft_that_claims_a_law_nobody_kept_is_judged_as_point_masses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        documented_example()
        + """

class Claiming(SuccessorDrafter):
    def propose(self, live, chosen):
        from dataclasses import replace

        return [replace(draft, is_sampled=True) for draft in super().propose(live, chosen)]
"""
    )
    install(tmp_path, "acme_claiming", "claiming = acme_claiming:Claiming", source)
    monkeypatch.syspath_prepend(tmp_path)
    harness, prompt = Harness("F4"), (0, 1, 2, 3, 0)
    harness.submit("plain", prompt, temperature=1.0, is_enabled=False)
    harness.submit("a", prompt, temperature=1.0, drafter="claiming", gamma=3)
    harness.submit("b", prompt, temperature=1.0, drafter="model", gamma=3)
    harness.run()
    assert harness.tokens("a") == harness.tokens("plain")
    assert harness.finished("a").report.num_drafted > 0
    assert harness.finished("b").report.num_accepted > 0


@pytest.mark.parametrize(
    ("entries", "source"),
    [
        ("lookup = acme_bad:Drafter", "class Drafter: ..."),
        ("Upper = acme_bad:Drafter", "class Drafter: ..."),
        ("absent = acme_bad:Nothing", "class Drafter: ..."),
        ("broken = acme_bad:Drafter", "raise RuntimeError"),
        ("shapeless = acme_bad:Drafter", "class Drafter: ..."),
        ("unbuilt = acme_bad:SuccessorDrafter", documented_example().replace("cls()", "cls(1, 2)")),
    ],
)
def test_a_package_that_is_no_drafter_is_refused_at_start(
    entries: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "acme_bad", entries, source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "acme_bad", raising=False)
    with pytest.raises(ConfigError, match=r"outrider\.drafters"):
        Harness("F3")


def test_every_drafter_says_what_it_needs_and_proposes() -> None:
    assert all(isinstance(kind.capabilities, DrafterCapabilities) for kind in REGISTRY.values())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "+",
        "model+",
        "model/",
        "/lookup",
        "a/b/c",
        "a+a",
        "a+b+c+d+e",
        "a:",
        "a:0",
        "a:x",
        "a:-1",
        "a:1:2",
        "a:1/b",
        "a:1+a:2",
    ],
)
def test_a_name_outside_the_grammar_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_drafter(name)
    assert refusal.value.field == "speculation.drafter"


def test_a_name_says_how_much_each_part_proposes() -> None:
    parts = parse_drafter("suffix:12+model/lookup:3+datastore")
    assert parts == (Part("suffix", None, 12), Part("model", "lookup", 3), Part("datastore"))
    assert "+".join(map(str, parts)) == "suffix:12+model/lookup:3+datastore"


@pytest.mark.parametrize("name", ["psychic", "lookup+psychic", "lookup/model", "model/model"])
def test_a_drafter_the_server_lacks_is_refused(name: str) -> None:
    with pytest.raises(RequestError):
        check_drafter(name, ["model", "lookup"], ["lookup"])


@pytest.mark.parametrize(("gone", "left"), GONE.items())
def test_a_drafter_that_is_gone_is_refused_with_what_replaces_it(gone: str, left: str) -> None:
    assert left in REGISTRY and gone not in REGISTRY
    known = DRAFTER_NAMES
    for name in (gone, f"{gone}:3", f"model+{gone}", f"model/{gone}:2+lookup"):
        with pytest.raises(RequestError, match=f"{gone} is gone since 0.3: use {left}"):
            check_drafter(name, known, known)
        with pytest.raises(ConfigError, match=f"default_drafter: .* use {left}"):
            Harness("F3", default_drafter=name)
        with pytest.raises(ConfigError, match=f"auto_drafters: .* use {left}"):
            Harness("F3", auto_drafters=("model", name))
        check_drafter(without_gone(name), known, known)
    # Another package may take the name.
    check_drafter(f"model/{gone}+{gone}", (*known, gone), (*known, gone))


@pytest.mark.parametrize(
    ("tuned", "current"),
    [
        ("model", "model"),
        ("suffix:3+model", "suffix:3+model"),
        ("recycling", "suffix"),
        ("model/recycling+recycling:4", "model/suffix+suffix:4"),
        ("recycling:2+suffix", "suffix"),
        ("ngram+recycling+lookup:9", "suffix+lookup:9"),
        ("recyclings", "recyclings"),
    ],
)
def test_a_bundle_tuned_to_a_drafter_that_is_gone_has_what_replaces_it(
    tuned: str, current: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert tuned_drafter(tuned) == current
    assert [one.levelname for one in caplog.records] == ["WARNING"] * (tuned != current)
    assert all(tuned in one.message and current in one.message for one in caplog.records)


@pytest.mark.parametrize(
    ("name", "left", "num_steps"), [("model+lookup", "lookup", 6), ("model/lookup", None, 19)]
)
def test_a_chain_goes_on_with_what_is_left_when_the_draft_model_fails(
    name: str, left: str | None, num_steps: int
) -> None:
    harness = Harness("F3")
    harness.draft.fail_at(1)
    harness.submit("a", [*range(10), 0, 1], max_tokens=20, drafter=name, gamma=3)
    harness.run()
    report = harness.finished("a").report
    assert harness.tokens("a") == [token % 10 for token in range(2, 22)]
    assert report.off_reason == "DEGRADED"
    assert report.drafter == (left or name)
    assert report.num_steps == num_steps


def test_without_a_draft_model_a_chain_is_what_remains_of_it() -> None:
    harness = Harness("F3", has_draft=False)
    harness.submit("a", [*range(10), 0, 1], max_tokens=9, drafter="model+lookup", gamma=3)
    harness.submit("b", max_tokens=9, drafter="model", gamma=3)
    harness.run()
    assert harness.finished("a").report.drafter == "lookup"
    assert harness.finished("a").report.num_accepted > 0
    assert harness.finished("b").report.off_reason == "NO_DRAFT"


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    harness = Harness("F3")
    for index, name in enumerate(("suffix", "model/suffix", "reference", "suffix+reference")):
        harness.submit(str(index), [1, 2, 3, 1, 2], drafter=name, gamma=3)
    harness.submit("cancelled", [1, 2, 3, 1, 2], drafter="suffix", gamma=3, max_tokens=50)
    for _ in range(3):
        harness.worker.run_step()
    assert harness.worker._parts.drafters["suffix"]._states
    harness.worker.cancel("internal-cancelled", RuntimeError())
    harness.run()
    for name in ("suffix", "reference"):
        assert not harness.worker._parts.drafters[name]._states
        assert not harness.worker._parts.drafters[name]._num_seen


def test_names_that_callers_compose_do_not_pile_up() -> None:
    harness = Harness("F3", costs=table(c=0.1), max_queued=1000)
    single = [name for name in harness.worker.drafter_names if name != "none"]
    names = ["+".join(parts) for parts in permutations(single, 4)]
    assert len(names) > 2 * MAX_COMPOSED
    for name in names[: 2 * MAX_COMPOSED]:
        harness.submit(name, drafter=name, max_tokens=3)
    harness.run()
    assert all(len(harness.tokens(name)) == 3 for name in harness.events)
    drafters = harness.worker._parts.drafters
    gamma_controller = harness.worker._parts.gamma_controller
    assert gamma_controller is not None
    assert len(drafters._composed) <= MAX_COMPOSED
    assert len(drafters._members) <= MAX_COMPOSED
    assert len(gamma_controller._acceptance._groups) <= MOST_GROUPS + 1


def test_a_drafter_that_cannot_forget_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forget(self: LookupDrafter, key: str) -> None:
        raise ValueError(key)

    monkeypatch.setattr(LookupDrafter, "forget", forget)
    harness = Harness("F3")
    for name in ("a", "b"):
        harness.submit(name, drafter="lookup", max_tokens=5)
    harness.run()
    assert harness.tokens("a") == harness.tokens("b") == [4, 5, 6, 7, 8]
    assert [record.message for record in caplog.records] == [
        "a drafter failed to forget a request"
    ] * 2
    harness.check_is_idle()
