"""The long check of equality finds nothing where nothing differs, and the one answer that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_equality import MATRIX, Sizes, compared, plain_answers, report
from scripts.tools.common import open_rig

PROMPTS = ((5, 9, 5, 9, 7), (8, 2, 8, 2))
MAX_TOKENS = 5


def test_an_answer_that_differs_is_counted_in_its_cells(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = open_rig(tiny_bundle, max_batch=1, num_threads=2)
    plain = plain_answers(rig, PROMPTS, MAX_TOKENS)
    rig.close()
    sizes = Sizes.of("model,lookup", "0,3", "1,2")
    changed = {**plain, "greedy": [plain["greedy"][0][:-1], plain["greedy"][1]]}
    for expected, count in ((plain, 0), (changed, 1)):
        found = compared(tiny_bundle, sizes, PROMPTS, expected, MAX_TOKENS, threads=2)
        assert len(found) == 2 * 2 * 2 * 2
        assert {one for (params, *_), one in found.items() if params == "greedy"} == {count}
        assert not any(one for (params, *_), one in found.items() if params != "greedy")
        capsys.readouterr()
        report(found, sizes, len(PROMPTS), "tiny")
        said = capsys.readouterr().out
        assert f"16 cells, {8 * count} of 32 answers differ" in said
        assert ("greedy, lookup, batch 2, gamma 3: 1 differ" in said) is (count == 1)


def test_the_matrix_has_every_drafter_gamma_and_batch() -> None:
    num_prompts, _, gammas, batches, drafters = MATRIX
    sizes = Sizes.of(drafters, gammas, batches)
    assert (sizes.gammas, sizes.batches) == (list(range(9)), list(range(1, 6)))
    assert num_prompts > max(sizes.batches), "some wait for a slot"
    assert {"model", "ouroboros", "lookahead", "model/lookup"} <= set(sizes.drafters)
    assert "none" not in sizes.drafters
