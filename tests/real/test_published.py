"""Published models, exported as a user does it: as exact as those that were made here."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import product
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
from outrider.runtime.offline.llm import LLM
from tokenizers import Tokenizer

from tests.export.certificate.bounds import within
from tests.export.certificate.mistakes import MISTAKES, planted
from tests.real.conftest import DRAFTS, Bundles

pytestmark = [pytest.mark.long, pytest.mark.real]
WEIGHTS = ("float32", "half", "int8", "int4", "w8a8")
MODELS = ("smollm2-135m", "gemma3-270m", "qwen-coder-1.5b")
CONTEXT = 1024
GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
SHARED = SamplingParams(max_tokens=32, temperature=0.8, seed=5, speculation={"mode": "seed_stable"})
in_every_kind = pytest.mark.parametrize(("name", "weights"), [*product(MODELS, WEIGHTS)])


def answers(bundle: Path, prompts: Sequence[str], params: Sequence[SamplingParams], **how: object):
    """Tokens of the answers by each of some parameters, and how many tokens were drafted in all."""
    with LLM(bundle, device="cpu", **how) as llm:
        found = [one for each in params for one in llm.generate(prompts, each)]
    reports = [one.outputs[0].speculation for one in found]
    drafted = sum(one.num_drafted for one in reports if one is not None)
    return [one.outputs[0].token_ids for one in found], drafted


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen-coder-0.5b"])
def test_a_mistake_is_five_times_too_far(
    models: Path, bundle_of: Bundles, name: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, checkpoint = (
        load_bundle(bundle_of(name)),
        open_checkpoint(models / name, max_context=CONTEXT),
    )
    model = checkpoint.load_as(torch.float32)
    bound = float32_bound(Reference(model), checkpoint.model_config, max_gamma=8)
    # What a wrong model rounds away is its own.
    monkeypatch.setattr(reference_module, "_most_apart", lambda *_: 0.0)
    path = bundle.model_path(bundle.manifest.target)
    with planted(model, mistake) as is_planted:
        if not is_planted:
            pytest.skip(f"{name} has no place for it")
        with pytest.raises(BundleError, match="parity case"):
            check_parity(
                model, path, checkpoint.model_config, max_gamma=8, bound=within(5 * bound.value)
            )


@pytest.mark.parametrize(
    ("name", "num_prompts", "num_tokens"),
    [("smollm2-135m", 20, 96), ("gemma3-270m", 20, 96), ("qwen-coder-1.5b", 6, 48)],
)
def test_greedy_answers_are_those_of_transformers(
    models: Path, bundle_of: Bundles, prompts: Sequence[str], name: str, num_prompts: int, num_tokens: int
) -> None:  # fmt: skip
    """Token for token, but for ties within the bound: each is the likeliest behind those before it."""
    tokenizer = Tokenizer.from_file(str(models / name / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in prompts[:num_prompts]]
    drafter = "model" if name in DRAFTS else "lookup"
    with LLM(bundle_of(name), device="cpu", drafter=drafter, gamma=4) as llm:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        found = llm.generate(texts, params)
    gc.collect()
    checkpoint = open_checkpoint(models / name, max_context=CONTEXT)
    model = checkpoint.load_as(torch.float32)
    bound = float32_bound(Reference(model), checkpoint.model_config, max_gamma=8).value
    num_ties = 0
    for ids, answer in zip(texts, found, strict=True):
        told = list(answer.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + told])).logits[0, len(ids) - 1 : -1].numpy()
        lost = logits.max(-1) - logits[np.arange(len(told)), told]
        num_ties += int((lost > 0).sum())
        assert lost.max() <= bound
    print(f"{name}: {num_prompts} x {num_tokens} tokens, {num_ties} ties within {bound:.2g}")


@pytest.mark.parametrize("most", [1, 8])
@in_every_kind
def test_drafts_and_neighbours_change_no_token(
    bundle_of: Bundles, prompts: Sequence[str], name: str, weights: str, most: int
) -> None:
    """Drafts on and off, alone and eight at a time, greedy and by shared noise."""
    bundle, asked = bundle_of(name, weights), prompts[:8]
    params = [{**each, "max_tokens": 16} if name in DRAFTS else each for each in (GREEDY, SHARED)]
    plain, none = answers(bundle, asked, params, drafter="lookup", gamma=0, max_running=1)
    assert none == 0
    if most > 1:
        assert (
            answers(bundle, asked, params, drafter="lookup", gamma=0, max_running=most)[0] == plain
        )
    for drafter in ("model", "lookup", "suffix") if name in DRAFTS else ("lookup", "suffix"):
        found, drafted = answers(bundle, asked, params, drafter=drafter, gamma=5, max_running=most)
        assert found == plain, drafter
        assert drafted > 0, drafter


@in_every_kind
def test_cached_prefixes_change_no_token(
    bundle_of: Bundles, prompts: Sequence[str], name: str, weights: str
) -> None:
    """Prompts that were asked before, and prompts with half of their answers behind them."""
    bundle = bundle_of(name, weights)
    drafter = "model" if name in DRAFTS else "lookup"
    how = {"device": "cpu", "drafter": drafter, "gamma": 3}
    with LLM(bundle, **how, prefix_cache_bytes=0) as llm:
        texts = [llm.encode(text) for text in prompts[8:12]]
        cold = llm.generate(texts, SHARED)
        longer = [ids + one.outputs[0].token_ids[:16] for ids, one in zip(texts, cold, strict=True)]
        cold_longer = llm.generate(longer, SHARED)
    with LLM(bundle, **how) as llm:
        first = llm.generate(texts, SHARED)
        again, warm_longer = llm.generate(texts, SHARED), llm.generate(longer, SHARED)
    told = [[one.outputs[0].token_ids for one in each] for each in (cold, first, again)]
    assert told[0] == told[1] == told[2]
    assert [one.outputs[0].token_ids for one in cold_longer] == [
        one.outputs[0].token_ids for one in warm_longer
    ]
    assert all(one.usage.cached_tokens > 0 for one in [*again, *warm_longer])
