"""``outrider.testing``: engines as they serve beside PyTorch, as users' own suites ask for it."""

from pathlib import Path

import numpy as np
import pytest
from outrider.engines.bundle.bundle import load_bundle
from outrider.engines.opening import open_engine
from outrider.export.certificate import engine_parity

pytest_plugins = ("pytester",)

SUITE = """
def test_mine(assert_parity):
    assert_parity({bundle!r}, {checkpoint!r}{more})
"""


def run(
    pytester: pytest.Pytester, bundle: Path, checkpoint: Path, more: str = ""
) -> pytest.RunResult:
    text = SUITE.format(bundle=str(bundle), checkpoint=str(checkpoint), more=more)
    pytester.makepyfile(text)
    return pytester.runpytest_inprocess("-p", "outrider.testing", "-p", "no:asyncio")


def test_an_export_passes_in_a_suite_of_its_owner_and_another_checkpoint_fails(
    pytester: pytest.Pytester, tiny_bundle: Path, tiny_checkpoints: tuple[Path, Path]
) -> None:
    target, draft = tiny_checkpoints
    run(pytester, tiny_bundle, target, f", draft_checkpoint={str(draft)!r}").assert_outcomes(
        passed=1
    )
    failed = run(pytester, tiny_bundle, draft)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines("*AssertionError: target: num_layers of this checkpoint is 1*")


def test_an_engine_that_strays_is_named(
    tiny_bundle: Path,
    tiny_checkpoints: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs that agree say nothing of an engine that feeds them wrongly."""

    def open_shifted(*asked: object, **options: object) -> object:
        engine = open_engine(*asked, **options)
        extend = engine.extend
        engine.extend = lambda spans: np.roll(extend(spans), 1, axis=0)
        return engine

    monkeypatch.setattr(engine_parity, "open_engine", open_shifted)
    monkeypatch.setattr(
        engine_parity,
        "certify_bundle",
        lambda bundle, checkpoints: {"target": bundle.manifest.certificate["target"]},
    )
    with pytest.raises(Exception, match="parity case engine differs by"):
        engine_parity.check_bundle(tiny_bundle, {"target": tiny_checkpoints[0]})
    assert load_bundle(tiny_bundle).manifest.certificate["target"]
