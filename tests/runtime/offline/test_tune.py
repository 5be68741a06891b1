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
from outrider.runtime.offline.search import Trial, choose, keep_best, search_drafter
from outrider.runtime.offline.speed import Measured
from outrider.runtime.offline.tuning import write_serving_defaults
from outrider.runtime.serving.opening import ServeOptions, open_serving, with_bundle_defaults
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
    return result.output


def test_the_search_is_written_down_and_its_choice_is_served(bundle: Path, costs: Path):
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
    choice = tuning["choice"]
    trials = [Trial(**trial) for trial in tuning["trials"]]
    assert ServingDefaults(**choice) == choose(trials, choice["source"])
    assert load_bundle(bundle).manifest.serving == ServingDefaults(**choice)
    assert output.strip().startswith(f"drafter {choice['drafter']}")
    assert "now the serving defaults" in output
    page = (bundle.parent / "out" / "index.html").read_text()
    assert page.count("<tr>") == 1 + len(trials) and "data:image/png;base64," in page


def test_a_dry_run_leaves_the_bundle_alone(bundle: Path, costs: Path):
    before = (bundle / "manifest.json").read_bytes()
    output = run_tune(
        bundle, costs, *("--drafters", "lookup", "--gammas", "1"), "--quick", "--dry-run"
    )
    assert "serving defaults" not in output
    assert (bundle / "manifest.json").read_bytes() == before


def trial(drafter: str, speedup: float, *, gamma: int | None = 2, is_kept: bool = True) -> Trial:
    return Trial(
        drafter=drafter, stage="gamma", gamma=gamma, phrase_length=None, num_phrases=None, window=None,
        tokens_per_s=100.0 * speedup, speedup=speedup, alpha_hat=0.5, tokens_per_step=1.5,
        is_kept=is_kept,
    )  # fmt: skip


def test_the_fastest_kept_setting_is_chosen_and_none_where_none_is_faster():
    trials = [trial("model", 9.0, is_kept=False), trial("model", 1.5), trial("lookup", 1.6)]
    assert choose(trials, "x") == ServingDefaults(drafter="lookup", gamma=2, source="x")
    nothing = ServingDefaults(drafter="none", gamma=None, source="x")
    assert choose([trial("model", 1.0)], "x") == choose([], "x") == nothing
    # The last stage of a drafter counts, even if an earlier one was luckier.
    last = replace(trial("model", 1.2, gamma=4), stage="phrase_length", phrase_length=2)
    assert choose([trial("model", 1.9), last], "x").phrase_length == 2


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
    found = [one for one in keep_best(tried) if one.is_kept]
    assert [one.gamma for one in found] == [kept]


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


def measured(rate: float) -> Measured:
    return Measured(
        tokens_per_s=rate, rounds=(rate,), alpha_hat=None, tokens_per_step=1.0, operations=1.0
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
    with caplog.at_level(logging.WARNING):
        serving = open_serving(bundle, replace(asked, leaves_drafter=True, leaves_gamma=True))
    speculation = serving.worker.default_speculation
    assert (speculation.drafter, speculation.gamma) == ("lookup", 3)
    assert "drafter lookup, gamma 3: the bundle's serving defaults (a test)" in caplog.text
    untouched = open_serving(bundle, asked).worker.default_speculation
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
    with pytest.raises(BundleError, match="serving: field 'gamma' must be an integer"):
        Manifest.from_json(json.dumps(data))
    data["serving"] |= {"gamma": 3}
    del data["serving"]["window"]
    assert Manifest.from_json(json.dumps(data)).serving == replace(tuned, window=None)
    del data["serving"]
    assert Manifest.from_json(json.dumps(data)).serving is None
