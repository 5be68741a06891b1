"""Published models, exported as a user does it: as exact as those that were made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider import SamplingParams
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import load_bundle
from outrider.export.certificate import reference as reference_module
from outrider.export.certificate.parity import check_parity, float32_bound
from outrider.export.certificate.reference import Reference
from outrider.export.checkpoint import open_checkpoint
from outrider.export.pipeline import export_bundle
from outrider.runtime.offline.llm import LLM
from tokenizers import Tokenizer

from tests.export.certificate.bounds import within
from tests.export.certificate.mistakes import MISTAKES, planted

pytestmark = [pytest.mark.long, pytest.mark.real]
NUM_PROMPTS, NUM_TOKENS, CONTEXT = 20, 96, 1024


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def exported(request, models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and its bundle in float32."""
    folder = models / request.param
    if not folder.exists():
        pytest.skip(f"no real models: {request.param} is missing")
    root = tmp_path_factory.mktemp("real") / request.param
    export_bundle(target=folder, draft=None, out=root, max_context=CONTEXT, progress=lambda _: None)
    return folder, root


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_five_times_too_far(
    exported: tuple[Path, Path], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root = exported
    checkpoint = open_checkpoint(folder, max_context=CONTEXT)
    model, bundle = checkpoint.load_as(torch.float32), load_bundle(root)
    bound = float32_bound(Reference(model), checkpoint.facts, max_gamma=8)
    # What a wrong model rounds away is its own.
    monkeypatch.setattr(reference_module, "_most_apart", lambda *_: 0.0)
    path = bundle.model_path(bundle.manifest.target)
    with planted(model, mistake) as is_planted:
        if not is_planted:
            pytest.skip(f"{folder.name} has no place for it")
        with pytest.raises(BundleError, match="parity case"):
            check_parity(model, path, checkpoint.facts, max_gamma=8, bound=within(5 * bound.value))


def test_greedy_answers_are_those_of_transformers(
    exported: tuple[Path, Path], prompts: Sequence[str]
) -> None:
    """Token for token, but for ties within the bound: each is the likeliest behind those before it."""
    folder, root = exported
    checkpoint = open_checkpoint(folder, max_context=CONTEXT)
    model = checkpoint.load_as(torch.float32)
    bound = float32_bound(Reference(model), checkpoint.facts, max_gamma=8).value
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in prompts[:NUM_PROMPTS]]
    with LLM(root, device="cpu", drafter="lookup", gamma=4) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        found = llm.generate(texts, params)
    for ids, answer in zip(texts, found, strict=True):
        told = list(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + told])).logits[0, len(ids) - 1 : -1].numpy()
        lost = logits.max(-1) - logits[np.arange(len(told)), told]
        assert lost.max() <= bound


@pytest.mark.parametrize("weights", ["half", "int8", "int4", "w8a8"])
def test_drafts_and_neighbours_change_no_token(
    models: Path, prompts: Sequence[str], tmp_path: Path, weights: str
) -> None:
    """Drafts on and off, alone and eight at a time, greedy and by shared noise."""
    root = tmp_path / "bundle"
    export_bundle(
        target=models / "smollm2-135m", draft=None, out=root, weights=weights, max_context=CONTEXT,
        progress=lambda _: None,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=32, temperature=0.0)
    shared = SamplingParams(
        max_tokens=32, temperature=0.8, seed=5, speculation={"mode": "seed_stable"}
    )
    found = []
    for gamma, max_running in ((0, 1), (0, 8), (5, 1), (5, 8)):
        with LLM(root, device="cpu", drafter="lookup", gamma=gamma, max_running=max_running) as llm:
            answers = [llm.generate(prompts[:8], one) for one in (greedy, shared)]
        found.append([[one.outputs[0].token_ids for one in each] for each in answers])
    assert all(one == found[0] for one in found)
