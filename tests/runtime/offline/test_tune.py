"""``outrider tune`` on a real bundle with a tiny budget, and servers that follow what it wrote."""

import asyncio
import itertools
import json
import logging
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from outrider import Client
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.manifest import Manifest, write_manifest
from outrider.engines.bundle.serving_defaults import ServingDefaults
from outrider.runtime.cli.main import app
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.offline.pages.tuning_page import describe
from outrider.runtime.offline.search import (
    PLAIN_TRIAL,
    Trial,
    contest,
    keep_best,
    search_drafter,
    serving_defaults,
)
from outrider.runtime.offline.speed import Interval, Measured
from outrider.runtime.offline.tuning import Tuning, write_serving_defaults
from outrider.runtime.serving.factory import load_model, with_bundle_defaults
from outrider.runtime.serving.settings import ServeOptions
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
TUNED = ServingDefaults(drafter="lookup", gamma=3, source="a test")


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What steps cost is measured once: copies of a bundle are the same models."""
    return tmp_path_factory.mktemp("costs")


def run_tune(bundle: Path, costs: Path, *options: str) -> str:
    prompts = bundle.parent / "prompts.txt"
    prompts.write_text("the quick brown fox\nonce upon a time\n")
    fixed = ("--costs", str(costs), "--out", str(bundle.parent / "out"))
    command = ["tune", str(bundle), "--prompts", str(prompts), *fixed, *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_search_is_written_down_and_of_one_round_nothing_comes(bundle: Path, costs: Path):
    before = (bundle / "manifest.json").read_bytes()
    output = run_tune(
        bundle,
        costs,
        *("--drafters", "model,lookup,ouroboros", "--gammas", "1,2", "--phrase-lengths", "2,3"),
        *("--windows", "0,3"),
        *("--max-tokens", "5", "--rounds", "1", "--quick"),
    )
    tuning = json.loads((bundle.parent / "out" / "tuning.json").read_text())
    tried = [
        (t["drafter"], t["stage"], t["gamma"], t["window"], t["phrase_length"], t["num_phrases"])
        for t in tuning["trials"]
    ]
    stages = [t for t in tuning["trials"] if t["drafter"] == "ouroboros" and t["is_kept"]]
    kept, window = stages[0]["gamma"], stages[1]["window"]
    assert tried == [
        *(("model", "gamma", gamma, None, None, None) for gamma in (None, 1, 2)),
        *(("lookup", "gamma", gamma, None, None, None) for gamma in (None, 1, 2)),
        *(("ouroboros", "gamma", gamma, None, None, 3) for gamma in (None, 1, 2)),
        *(("ouroboros", "window", kept, width, None, 3) for width in (0, 3)),
        *(("ouroboros", "phrase_length", kept, window, length, 3) for length in (2, 3)),
    ]
    assert tuning["choice"] is None
    assert (bundle / "manifest.json").read_bytes() == before
    assert output.startswith("undecided: 1 rounds are too few for intervals\nNothing is written")
    page = (bundle.parent / "out" / "index.html").read_text()
    assert page.count("<tr>") == 1 + len(tried) and "data:image/png;base64," in page


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_decided_search_is_written_unless_it_is_dry(
    bundle: Path, costs: Path, is_dry: bool, monkeypatch: pytest.MonkeyPatch
):
    """Ten rounds in which drafting took twice as long: times are not the machine's here."""

    def scripted(rig, prompts, settings, options, **_: object):
        assert options.rounds == 10
        return measured(*[1.0] * 10), [measured(*[0.5] * 10) for _ in settings]

    monkeypatch.setattr("outrider.runtime.offline.tuning.measure_settings", scripted)
    before = (bundle / "manifest.json").read_bytes()
    options = ("--drafters", "lookup", "--gammas", "1", "--rounds", "10")
    output = run_tune(bundle, costs, *options, *(["--dry-run"] if is_dry else []))
    assert output.startswith(
        "plain decoding; the next: drafter lookup, gamma auto, 0.50 (0.50 to 0.50)"
    )
    assert ("Written: the serving defaults" in output) is not is_dry
    assert ((bundle / "manifest.json").read_bytes() == before) is is_dry
    if not is_dry:
        serving = load_bundle(bundle).manifest.serving
        assert serving is not None and (serving.drafter, serving.gamma) == ("none", None)


def trial(
    drafter: str,
    speedup: float,
    *,
    gamma: int | None = 2,
    is_kept: bool = True,
    interval: Interval | None = None,
) -> Trial:
    return Trial(
        drafter=drafter, stage="gamma", gamma=gamma, phrase_length=None, num_phrases=None, window=None,
        tokens_per_s=100.0 * speedup, speedup=speedup, alpha_hat=0.5, tokens_per_step=1.5,
        interval=interval or (speedup - 0.04, speedup + 0.04), is_kept=is_kept,
    )  # fmt: skip


def test_the_fastest_kept_setting_wins_and_plain_decoding_where_none_is_faster():
    trials = [trial("model", 9.0, is_kept=False), trial("model", 1.5), trial("lookup", 1.6)]
    found = contest(trials)
    assert (found.winner, found.rival, found.is_decided) == (trials[2], trials[1], True)
    defaults = ServingDefaults(drafter="lookup", gamma=2, source="x")
    assert serving_defaults(found.winner, "x") == defaults
    slow = trial("model", 0.9)
    found = contest([slow])
    assert (found.winner, found.rival, found.is_decided) == (PLAIN_TRIAL, slow, True)
    nothing = ServingDefaults(drafter="none", gamma=None, source="x")
    assert serving_defaults(found.winner, "x") == nothing
    # The last stage of a drafter counts, even if an earlier one was luckier.
    last = replace(trial("model", 1.2, gamma=4), stage="phrase_length", phrase_length=2)
    assert contest([trial("model", 1.9), last]).winner is last


@pytest.mark.parametrize(
    ("trials", "rival"),
    [
        ([trial("model", 1.5), trial("lookup", 1.43)], "lookup"),
        ([trial("model", 1.03)], "none"),
        ([trial("model", 0.97)], "model"),
        # Not the next by its median, but it may be as fast.
        ([trial("model", 1.5), trial("lookup", 1.4), trial("suffix", 1.3, interval=(1.0, 1.6))], "suffix"),
    ],
)  # fmt: skip
def test_a_search_is_undecided_where_intervals_meet(trials: list[Trial], rival: str):
    found = contest(trials)
    assert not found.is_decided
    assert found.rival is not None and found.rival.drafter == rival


def test_without_intervals_nothing_is_decided():
    assert not contest([replace(trial("model", 9.0), interval=None)]).is_decided
    slower = replace(trial("lookup", 1.1), interval=None)
    assert not contest([trial("model", 9.0), slower]).is_decided


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (
            [trial("model", 1.5, gamma=None), trial("lookup", 1.2)],
            "drafter model, gamma auto, 1.50 (1.46 to 1.54) times plain decoding; the next: drafter lookup, gamma 2, "
            "1.20 (1.16 to 1.24) times plain decoding",
        ),
        (
            [trial("model", 1.02)],
            "undecided: drafter model, gamma 2, 1.02 (0.98 to 1.06) times plain decoding is not apart from plain "
            "decoding",
        ),
        ([replace(trial("model", 2.0), interval=None)], "undecided: 3 rounds are too few for intervals"),
    ],
)  # fmt: skip
def test_what_came_of_a_search_is_said_in_words(trials: list[Trial], words: str):
    tuning = Tuning(
        bundle="b", device="cpu", num_prompts=1, max_tokens=2, batch=1, rounds=3, temperature=0.0,
        trials=tuple(trials), contest=contest(trials), choice=None, source="x",
    )  # fmt: skip
    assert describe(tuning) == words


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [("ouroboros", {"draft_window": 8}), ("lookahead", {"window": 8})],
)
def test_a_tuned_window_is_the_drafters_own(drafter: str, settings: dict[str, int]):
    tuned = ServingDefaults(drafter=drafter, gamma=4, window=8, source="x")
    config, line = with_bundle_defaults(
        ServerConfig(), tuned, leaves_drafter=True, leaves_gamma=True
    )
    assert config.drafting == replace(ServerConfig().drafting, **settings)
    assert "window 8" in line


@pytest.mark.parametrize(("fixed", "kept"), [(1.519, None), (1.56, 4), (1.2, None)])
def test_a_fixed_gamma_must_clearly_beat_the_adaptive_one(fixed: float, kept: int | None):
    tried = [trial("model", fixed, gamma=4), trial("model", 1.5, gamma=None)]
    found = [one for one in keep_best(tried, [measured(fixed), measured(1.5)]) if one.is_kept]
    assert [one.gamma for one in found] == [kept]


@pytest.mark.parametrize(("unlucky", "kept"), [(1, 4), (2, None)])
def test_a_fixed_gamma_must_be_faster_in_its_whole_interval(unlucky: int, kept: int | None):
    """Of nine rounds one may say otherwise."""
    tried = [trial("model", 1.6, gamma=4), trial("model", 1.5, gamma=None)]
    rates = [1.6] * (9 - unlucky) + [1.4] * unlucky
    found = keep_best(tried, [measured(*rates), measured(*[1.5] * 9)])
    assert [one.gamma for one in found if one.is_kept] == [kept]


@pytest.mark.parametrize(
    ("drafter", "stage", "name", "usual"),
    [
        ("ouroboros", "window", "window", 0),
        ("lookahead", "window", "window", 4),
        ("ouroboros", "phrase_length", "phrase_length", 4),
    ],
)
@pytest.mark.parametrize(("num_unlucky", "wins"), [(0, True), (2, False)])
def test_other_settings_must_be_faster_than_the_default_in_their_whole_interval(
    drafter: str, stage: str, name: str, usual: int, num_unlucky: int, wins: bool
):
    tried = [
        replace(trial(drafter, speedup), stage=stage, **{name: value})
        for speedup, value in ((1.01, 8), (1.0, usual))
    ]
    rates = [1.01] * (9 - num_unlucky) + [0.9] * num_unlucky
    found = keep_best(tried, [measured(*rates), measured(*[1.0] * 9)])
    assert [getattr(one, name) for one in found if one.is_kept] == [8 if wins else usual]
    # Of too few rounds nothing follows.
    found = keep_best(tried, [measured(1.01), measured(1.0)])
    assert found[1].is_kept


def test_the_search_descends_one_coordinate_after_the_other():
    speed = {(2, None): 3.0, (4, None): 5.0, (4, 1): 6.0, (4, 6): 4.0}
    asked = []

    def measure(stage: str, settings: list[SpeculationParams]):
        asked.append((stage, [(one.gamma, one.phrase_length) for one in settings]))
        return measured(1.0), [measured(speed[one.gamma, one.phrase_length]) for one in settings]

    trials = search_drafter("phrases", (2, 4), (0, 4), (1, 6), measure)
    assert asked == [("gamma", [(2, None), (4, None)]), ("phrase_length", [(4, 1), (4, 6)])]
    assert [(one.gamma, one.phrase_length) for one in trials if one.is_kept] == [(4, None), (4, 1)]
    search_drafter("lookup", (2, 4), (0, 4), (1, 6), measure)
    assert len(asked) == 3


def measured(*rates: float) -> Measured:
    return Measured(
        tokens_per_s=rates[0], rounds=rates, alpha_hat=None, tokens_per_step=1.0, operations=1.0
    )


@pytest.mark.parametrize("leaves", list(itertools.product((True, False), repeat=2)))
def test_what_the_operator_left_open_the_bundle_decides(leaves: tuple[bool, bool]):
    drafter, gamma = leaves
    asked = ServerConfig(default_drafter="suffix", default_gamma=7)
    config, line = with_bundle_defaults(asked, TUNED, leaves_drafter=drafter, leaves_gamma=gamma)
    expected = replace(
        asked,
        default_drafter="lookup" if drafter else "suffix",
        # Found for lookup, so of no use to suffix.
        default_gamma=3 if drafter and gamma else 7,
    )
    assert config == expected
    assert (line is None) == (config == asked)
    assert line is None or ("a test" in line and ("gamma 3" in line) == gamma)


@pytest.mark.parametrize(
    ("tuned", "served"),
    [("ngram", "suffix"), ("recycling:2+suffix+model:3", "suffix+model:3"), ("lookup", "lookup")],
)
def test_a_bundle_tuned_to_a_drafter_that_is_gone_is_served_with_another(
    tuned: str, served: str, caplog: pytest.LogCaptureFixture
):
    config, line = with_bundle_defaults(
        ServerConfig(), replace(TUNED, drafter=tuned), leaves_drafter=True, leaves_gamma=True
    )
    assert (config.default_drafter, config.default_gamma) == (served, 3)
    assert f"drafter {served}" in line
    assert ("is gone since 0.3" in caplog.text) is (tuned != served)


def test_phrases_of_the_bundle_reach_the_drafters():
    tuned = replace(TUNED, drafter="ouroboros", gamma=None, phrase_length=6, num_phrases=2)
    config, line = with_bundle_defaults(
        ServerConfig(), tuned, leaves_drafter=True, leaves_gamma=True
    )
    assert (config.drafting.phrase_length, config.drafting.num_phrases) == (6, 2)
    assert config.default_gamma is None and "gamma auto" in line and "phrase_length 6" in line
    with pytest.raises(ConfigError, match="phrase_length"):
        with_bundle_defaults(
            ServerConfig(), replace(tuned, phrase_length=0), leaves_drafter=True, leaves_gamma=True
        )


def test_an_opened_server_uses_them_and_says_so(bundle: Path, caplog: pytest.LogCaptureFixture):
    write_serving_defaults(bundle, TUNED)
    asked = ServeOptions(config=ServerConfig(default_gamma=2))
    with caplog.at_level(logging.INFO):
        serving = load_model(bundle, replace(asked, leaves_drafter=True, leaves_gamma=True))
    speculation = serving.worker.default_speculation
    assert (speculation.drafter, speculation.gamma) == ("lookup", 3)
    assert "drafter lookup, gamma 3: the bundle's serving defaults (a test)" in caplog.text
    untouched = load_model(bundle, asked).worker.default_speculation
    assert (untouched.drafter, untouched.gamma) == ("model", 2)


async def test_the_serve_command_follows_them(bundle: Path, tmp_path: Path):
    write_serving_defaults(bundle, TUNED)
    port_file = tmp_path / "port"
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.runtime.cli", "serve", str(bundle), "--port", "0"),
        *("--port-file", str(port_file), "--lb-delay-s", "0", "--device", "cpu"),
        cwd=ROOT,
        env={"PATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await asyncio.wait_for(server.stdout.readline(), 60)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        async with Client(address) as client:
            await client.wait_ready(timeout_s=10)
            responses = [r async for r in client.generate("the the the", max_tokens=8)]
        assert responses[-1].finish.speculation.drafter == "lookup"
    finally:
        server.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(server.communicate(), 60)
    assert "drafter lookup, gamma 3: the bundle's serving defaults" in err.decode()


def test_defaults_survive_the_manifest_and_wrong_ones_are_refused_by_name(bundle: Path):
    manifest = load_bundle(bundle).manifest
    assert manifest.serving is None
    tuned = replace(TUNED, phrase_length=4, num_phrases=3, window=0)
    write_manifest(bundle, replace(manifest, serving=tuned))
    loaded = load_bundle(bundle).manifest
    assert loaded == replace(manifest, serving=tuned)
    data = json.loads(loaded.to_json())
    data["serving"]["gamma"] = "many"
    with pytest.raises(BundleError, match=r"'serving\.gamma': Expected `int"):
        Manifest.from_json(json.dumps(data))
    data["serving"] |= {"gamma": 3}
    del data["serving"]["window"]
    assert Manifest.from_json(json.dumps(data)).serving == replace(tuned, window=None)
    del data["serving"]
    assert Manifest.from_json(json.dumps(data)).serving is None
