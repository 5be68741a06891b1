"""``outrider analyze`` on a real bundle with a tiny budget: structure and arithmetic, never times."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.runtime.cli.main import app
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.events import SpeculationReport
from outrider.runtime.gamma.costs import CostTable, HostCosts, ModelCosts, RowCosts, RowKind
from outrider.runtime.offline.advice import recommendation
from outrider.runtime.offline.figures import FIGURES
from outrider.runtime.offline.options import AnalysisOptions
from outrider.runtime.offline.prompts import own_prompts, read_prompts
from outrider.runtime.offline.results import Analysis, SpeedRow
from outrider.runtime.offline.rig import RigOptions, open_rig
from outrider.runtime.offline.speed import (
    Measured,
    alpha_by_place,
    median_interval,
    num_trials,
)
from outrider.runtime.offline.step_costs import StepCosts
from outrider.runtime.oracle.analysis import optimal_gamma, walltime_factor
from typer.testing import CliRunner

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def analysed(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the command wrote."""
    folder = tmp_path_factory.mktemp("analysis")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('"the quick brown fox"\n\n{"prompt": "def add(a, b):"}\n')
    result = CliRunner().invoke(
        app,
        [
            *("analyze", str(tiny_bundle), "--prompts", str(prompts), "--out", str(folder / "out")),
            *("--drafters", "model,lookup,model/lookup", "--gammas", "1,3", "--max-tokens", "6"),
            *("--rounds", "1", "--leniences", "1,0.3", "--costs", str(folder / "costs"), "--quick"),
        ],
    )
    assert result.exit_code == 0, result.output
    page, advice = result.stdout.strip().splitlines()
    assert (
        page.endswith("index.html")
        and f"Recommended: outrider serve {tiny_bundle} --drafter" in advice
    )
    # Off a terminal every phase says how far it is.
    for phase in ("texts at temperature 0", "speed at temperature 1"):
        assert re.search(rf"^outrider: {phase}: (\d+) of \1$", result.stderr, re.M)
    return folder / "out"


@pytest.fixture(scope="module")
def found(analysed: Path) -> dict:
    return json.loads((analysed / "analysis.json").read_text())


def test_every_drafter_gamma_and_temperature_has_its_row(found: dict):
    cells = {(row["drafter"], row["temperature"], row["gamma"]) for row in found["speeds"]}
    names = ("model", "lookup", "model/lookup")
    assert cells == {(name, t, gamma) for name in names for t in (0.0, 1.0) for gamma in (1, 3)}
    alphas = {(row["drafter"], row["temperature"]) for row in found["alphas"]}
    # A cascade has no law of one token.
    assert alphas == {(name, t) for name in names[:2] for t in (0.0, 1.0)}
    assert all(row["num_positions"] == 2 * 6 for row in found["alphas"])
    assert all(
        row["lenient"]["1.0"] == row["alpha"] <= row["lenient"]["0.3"] for row in found["alphas"]
    )


def test_predictions_are_the_formula_on_what_was_measured(found: dict):
    alphas = {(row["drafter"], row["temperature"]): row["alpha"] for row in found["alphas"]}
    costs = {row["temperature"]: row for row in found["costs"]}
    for row in found["speeds"]:
        cost = costs[row["temperature"]]
        assert row["draft_cost"] == cost["draft_cost"][row["drafter"]]
        assert row["verify_cost"] == cost["verify_cost"][str(row["gamma"] + 1)]
        assert cost["verify_cost"]["1"] == 1.0
        alpha = alphas.get((row["drafter"], row["temperature"]), row["alpha_hat"])
        assert row["alpha"] == alpha
        assert row["paper"] == walltime_factor(alpha, row["gamma"], row["draft_cost"])
        assert row["predicted"] == walltime_factor(
            alpha, row["gamma"], row["draft_cost"], verify_cost=row["verify_cost"]
        )
        best, _ = optimal_gamma(
            alpha,
            row["draft_cost"],
            max_gamma=8,
            verify_cost=lambda k, cost=cost: cost["verify_cost"][str(k)],
        )
        assert row["best_gamma"] == best


def test_what_was_counted_fits_together(found: dict):
    for row in found["speeds"]:
        assert 1.0 <= row["tokens_per_step"] <= row["gamma"] + 1
        assert 0.0 <= (row["alpha_hat"] or 0.0) <= 1.0
        assert 1.0 <= row["operations"] <= row["gamma"] + 1
    assert found["seconds"] == "wall"
    plain = next(trace for trace in found["traces"] if trace["gamma"] == 0)
    # One pass reads the prompt and gives the first token.
    assert len(plain["target_ms"]) == 1 + 5 and plain["draft_ms"] == []
    assert all(trace["draft_ms"] for trace in found["traces"] if trace["gamma"])


def test_the_page_has_everything_in_itself(analysed: Path, found: dict):
    page = (analysed / "index.html").read_text()
    assert not re.search(r"https?://|src=\"(?!data:)|href=", page)
    assert page.count("data:image/png;base64,") == len(FIGURES)
    assert "<h2>Recommendation</h2>" in page and "Recommended: outrider serve" in page
    for name in FIGURES:
        assert (analysed / f"{name}.png").read_bytes().startswith(PNG)
    tables = [table.count("<tr>") - 1 for table in re.findall(r"<table>.*?</table>", page, re.S)]
    assert tables == [len(found[k]) for k in ("alphas", "costs", "speeds", "alphas")]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "at least one prompt"),
        ("not json", "line 1: must be JSON"),
        ('"fine"\n{"text": "x"}', "line 2: must be a string"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, rule: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_prompts(path)
    with pytest.raises(ConfigError, match="readable"):
        read_prompts(tmp_path / "missing.txt")


def test_other_files_hold_a_prompt_per_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n"two" {\n')
    assert read_prompts(path) == ("one", '"two" {')


def test_own_prompts_are_read_by_the_tokenizer_that_was_hashed(tiny_bundle: Path, tmp_path: Path):
    bundle = load_bundle(Path(shutil.copytree(tiny_bundle, tmp_path / "bundle")))
    encoded = own_prompts(("the quick",), None, max_tokens=4)
    assert encoded is not None and encoded(bundle)
    path = bundle.root / TOKENIZER_FILE
    path.write_text(path.read_text().replace("</s>", "</t>"))
    with pytest.raises(BundleError, match=TOKENIZER_FILE):
        encoded(bundle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gammas", "1,x"), "gammas: must be numbers"),
        (("--gammas", "9"), "gammas: must include one of 1..8"),
        (("--temperatures", "3"), "temperatures: must be in"),
        (("--leniences", "0"), "leniences: must be in"),
        (("--batch", "5"), "batch: must be at most 4"),
        (("--drafters", "nobody"), "drafters: nobody: must be one of"),
        (("--max-tokens", "256"), "max_tokens: must be less than 256"),
        (("--max-tokens", "255"), "prompts: prompt 1: must have 1..1 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    tiny_bundle: Path, tmp_path: Path, arguments: tuple[str, str], message: str
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick\n")
    costs = tmp_path.parent / "costs-of-refusals"
    fixed = ("analyze", str(tiny_bundle), "--prompts", str(prompts), "--costs", str(costs))
    result = CliRunner().invoke(app, [*fixed, *arguments])
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


def test_quick_asks_for_less_and_never_for_more():
    options = AnalysisOptions(max_tokens=8, rounds=5)
    assert options.quick().max_tokens == 8 and options.quick().rounds == 1
    assert AnalysisOptions(max_tokens=500).quick().max_tokens < 500


def test_no_measured_request_learns_from_another():
    shared = DraftingConfig(history_scope=HistoryScope.SERVER, datastore="corpus")
    drafting = AnalysisOptions(rig=RigOptions(drafting=shared)).drafting()
    assert drafting == replace(shared, history_scope=HistoryScope.REQUEST)


def test_costs_are_in_units_of_the_plain_step():
    model = ModelCosts(
        batches=(1, 2),
        tokens=(2, 5),
        seconds=((4.0, 7.0), (8.0, 14.0)),
        capacity=128,
        position_s=0.0,
    )
    draft = ModelCosts(batches=(1,), tokens=(2,), seconds=((0.5,),), capacity=128, position_s=0.0)
    rows = {kind: RowCosts(row_s=0.25, token_s=0.125) for kind in RowKind}
    host = HostCosts(step_s=0.75, call_s=0.375, rows=rows)
    table = CostTable(target=model, draft=draft, catch_up=draft, host=host, capacities=(128,))
    costs = StepCosts(table=table, kind=RowKind.GREEDY)
    assert costs.step_s(1) == costs.step_s(2) == 4.0 + 0.75 + 0.25
    assert costs.v(1) == 1.0 and costs.v(5) == 8.0 / 5.0
    assert costs.c(uses_model=True) == (0.5 + 0.375 + 0.125) / 5.0
    assert costs.c(uses_model=False) == 0.125 / 5.0
    assert StepCosts(table=table, kind=RowKind.GREEDY, batch=2).step_s(1) == 8.0 + 0.75 + 0.5


def test_a_speed_up_is_the_median_of_paired_rounds():
    plain = Measured(
        tokens_per_s=4.0, rounds=(2.0, 4.0, 10.0), alpha_hat=None, tokens_per_step=1, operations=1
    )
    fast = Measured(
        tokens_per_s=6.0, rounds=(6.0, 6.0, 15.0), alpha_hat=None, tokens_per_step=1, operations=1
    )
    assert fast.over(plain) == 1.5
    assert fast.interval_over(plain) is None


@pytest.mark.parametrize(
    ("num_values", "num_beyond"), [(5, None), (6, 0), (8, 0), (9, 1), (12, 2), (25, 7)]
)
def test_an_interval_holds_the_median_with_its_confidence(num_values: int, num_beyond: int | None):
    """Counts of the binomial table: so many values beyond each end, and one more would be too many."""
    values = [float(number) for number in range(num_values)]
    expected = (
        None if num_beyond is None else (values[num_beyond], values[num_values - 1 - num_beyond])
    )
    assert median_interval(values[::-1]) == expected


def speed_row(drafter: str, speedup: float, temperature: float = 0.0, **fields: object) -> SpeedRow:
    return SpeedRow(
        **{
            "drafter": drafter, "temperature": temperature, "gamma": 4, "alpha": 0.78, "draft_cost": 0.05,
            "verify_cost": 1.3, "paper": None, "predicted": None, "best_gamma": None, "alpha_hat": None,
            "tokens_per_step": 2.0, "operations": 2.0, "tokens_per_s": 100.0 * speedup, "speedup": speedup, **fields,
        }
    )  # fmt: skip


def analysis_of(*rows: SpeedRow) -> Analysis:
    return Analysis(
        bundle="b", folder="my models/b", device="cpu", weights="float32", num_prompts=7, max_tokens=9, batch=1,
        rounds=3, seconds="wall", alphas=(), costs=(), speeds=rows, plain_tokens_per_s={}, traces=(),
    )  # fmt: skip


def test_a_recommendation_names_the_drafter_what_it_gains_and_why():
    advice = recommendation(
        analysis_of(
            speed_row("model", 1.5, interval=(1.4, 1.6)),
            speed_row("model", 1.2, gamma=1),
            speed_row("model", 1.44, 1.0, gamma=1, alpha=None),
            speed_row("lookup", 1.6, paper=2.5, predicted=1.75),
            speed_row("lookup", 0.9, 1.0),
        )
    )
    assert advice == (
        "At temperature 0 the fastest is lookup with 4 draft tokens: 1.60 times plain decoding. "
        "Theorem 3.8 says 2.50 as printed, and 1.75 with the measured cost of verification. There the target "
        "keeps 78 % of the drafts, a draft token costs 0.05 plain steps, and a pass over 5 tokens 1.30. "
        "At temperature 1 the fastest is model with 1 draft token: 1.44 times plain decoding. There a draft token "
        "costs 0.05 plain steps, and a pass over 2 tokens 1.30. "
        "Recommended: outrider serve 'my models/b' --drafter model, 1.47 times plain decoding over these temperatures "
        "(geometric mean). The server chooses each step's draft tokens by itself. "
        "Measured over 7 prompts in rounds of every setting: 3, at batch 1. Differences of a few percent may be "
        "chance. outrider tune compares settings until they are apart and writes its choice into the bundle."
    )


def test_where_nothing_gains_plain_decoding_is_recommended():
    advice = recommendation(analysis_of(speed_row("model", 0.8, interval=(0.7, 0.9))))
    assert (
        "nothing is faster than plain decoding; model with 4 draft tokens comes closest: 0.80 times plain decoding "
        "(0.70 to 0.90)" in advice
    )
    assert "Recommended: outrider serve 'my models/b' --drafter none." in advice
    assert "chance" not in advice


def test_trials_are_first_tokens_and_those_behind_an_accepted_one():
    report = SpeculationReport(
        is_on=True, off_reason=None, drafter="model", mode="max_accept", lenience=1.0, num_steps=5,
        num_emitted=9, num_drafted=9, num_accepted=4, alpha_hat=None, draft_utilization=None, tokens_per_step=None,
        accepted_by_position=(3, 1, 0), drafted_by_position=(5, 2, 2), num_fallbacks=0,
    )  # fmt: skip
    assert num_trials(report) == 5 + 2 + 1
    # The second draft of another request: one of two first tokens kept, and none behind it.
    other = replace(report, accepted_by_position=(1,), drafted_by_position=(2, 1))
    assert alpha_by_place([report, other]) == (4 / 7, 1 / 3, 0.0)
    assert alpha_by_place([]) == ()


def test_a_recommendation_says_what_heads_are_trained_on():
    analysis = analysis_of(speed_row("model", 0.8))
    assert "trained on chats" not in recommendation(analysis)
    assert "heads are trained on chats" in recommendation(replace(analysis, has_head=True))


def test_seconds_of_processors_are_kept_from_servers(tiny_bundle: Path, tmp_path: Path):
    options = RigOptions(knows_costs=True, costs_folder=tmp_path / "costs", counts_processor=True)
    rig = open_rig(tiny_bundle, options)
    rig.close()
    assert rig.clock is time.process_time and rig.costs is not None
    assert not (tmp_path / "costs").exists()
