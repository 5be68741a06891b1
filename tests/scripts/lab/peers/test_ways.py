"""Each peer's own options for a way of decoding; none of the peers is needed to say them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from scripts.lab.peers.cells import PEER_DRAFTERS
from scripts.lab.peers.jobs import FOLDER, OURS, PEERS

OTHERS = tuple(peer for peer in PEERS if peer != OURS)
SOURCES_ONLY = {"ctranslate2"}
"""Asked for encoder-decoder models alone."""
TEXT_ONLY = {"openvino", "genai", "llamacpp"}
UNABLE = {
    "transformers": {"chained-lookup"},
    "openvino": {"chained-lookup"},
    "genai": set(),
    "llamacpp": {"chained-lookup"},
    "ctranslate2": set(PEER_DRAFTERS),
}
CHOOSERS = {
    ("transformers", "model"), ("openvino", "model"), ("genai", "model"), ("genai", "lookup"),
}  # fmt: skip


def job(drafter: str | None = None, **changes: Any) -> dict[str, Any]:
    values = {
        "weights": "float32", "threads": 2, "drafter": drafter, "gamma": 5 if drafter else 0, "ngram": 3, "batch": 1,
        "prompts": [[1, 2, 3]], "max_tokens": 7, "reads_source": False,
    }  # fmt: skip
    return {**values, **changes}


def ways_of(peer: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("shared", peer):
        monkeypatch.syspath_prepend(str(FOLDER / folder))
    monkeypatch.delitem(sys.modules, "ways", raising=False)
    return importlib.import_module("ways")


@pytest.mark.parametrize("peer", OTHERS)
def test_a_peer_refuses_the_drafters_that_it_lacks(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ways_of(peer, monkeypatch)
    unable = importlib.import_module("peer_job").UnableError
    reads_source = peer in SOURCES_ONLY
    ways.check(job(reads_source=reads_source))
    for drafter in PEER_DRAFTERS:
        asked = job(drafter, reads_source=reads_source)
        if drafter in UNABLE[peer]:
            with pytest.raises(unable, match=f"^has no drafter {drafter}$"):
                ways.check(asked)
        else:
            ways.check(asked)
    with pytest.raises(unable, match=r"^has no drafter suffix\+model$"):
        ways.check(job("suffix+model", reads_source=reads_source))


@pytest.mark.parametrize(
    ("peer", "changes", "reason"),
    [
        ("transformers", {"weights": "int8"}, "torch on the CPU has no weights in blocks"),
        ("transformers", {"drafter": "model", "batch": 2}, "assisted generation takes one sequence"),
        ("transformers", {"drafter": "lookup", "batch": 2}, "assisted generation takes one sequence"),
        ("genai", {"drafter": "model", "batch": 2}, "speculative and n-gram decoding take one sequence"),
        ("genai", {"drafter": "lookup", "batch": 2}, "speculative and n-gram decoding take one sequence"),
        ("llamacpp", {"batch": 2}, "Llama of llama-cpp-python generates one sequence"),
        ("ctranslate2", {}, "is asked for encoder-decoder models only"),
        *[(peer, {"reads_source": True}, "has no encoder-decoder models") for peer in sorted(TEXT_ONLY)],
    ],
)  # fmt: skip
def test_a_peer_refuses_batches_and_weights_that_it_cannot(
    peer: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ways_of(peer, monkeypatch)
    unable = importlib.import_module("peer_job").UnableError
    with pytest.raises(unable) as caught:
        ways.check(job(**changes))
    assert str(caught.value) == reason


@pytest.mark.parametrize("peer", sorted(set(OTHERS) - SOURCES_ONLY))
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_a_peer_that_chooses_no_gamma_says_so(
    peer: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ways_of(peer, monkeypatch)
    fixed = importlib.import_module("peer_job").FixedGammaError
    if (peer, drafter) in CHOOSERS:
        ways.check(job(drafter, gamma=None))
    else:
        with pytest.raises(fixed):
            ways.check(job(drafter, gamma=None))


@pytest.mark.parametrize("peer", ["transformers", "genai", "openvino"])
def test_peers_that_batch_do_so_plainly(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways_of(peer, monkeypatch).check(job(batch=8))


def test_transformers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ways_of("transformers", monkeypatch)
    plain = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    assert ways.generate_options(job()) == ways.generate_options(job("model")) == plain
    looking = {**plain, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
    assert ways.generate_options(job("lookup")) == looking
    assert ways.assistant_settings(job("model"))["num_assistant_tokens"] == 5
    assert ways.assistant_settings(job("model", gamma=None)) == {}


def test_sources_are_answered_at_one_length_with_the_end_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = ways_of("transformers", monkeypatch).generate_options(job(reads_source=True))
    theirs = ways_of("ctranslate2", monkeypatch)
    options = theirs.decoding_options(job(reads_source=True))
    assert ours["min_new_tokens"] == ours["max_new_tokens"] == 7
    assert options["min_decoding_length"] == options["max_decoding_length"] == 7
    assert (options["beam_size"], options["max_input_length"]) == (1, 0)
    assert theirs.translator_options(job())["compute_type"] == "float32"
    assert theirs.translator_options(job(weights="int8"))["compute_type"] == "int8"


def test_openvino_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ways_of("openvino", monkeypatch)
    plain = {"max_new_tokens": 7, "ignore_eos": True, "do_sample": False}
    assert ways.generation_settings(job()) == plain
    assert ways.generation_settings(job("model")) == {**plain, "num_assistant_tokens": 5}
    sure = {**plain, "assistant_confidence_threshold": ways.CONFIDENCE}
    assert ways.generation_settings(job("model", gamma=None)) == sure
    looking = {**plain, "num_assistant_tokens": 5, "max_ngram_size": 3}
    assert ways.generation_settings(job("lookup")) == looking
    assert ways.pipeline_options(job("lookup")) == {"prompt_lookup": True}
    assert ways.pipeline_options(job("model")) == ways.pipeline_options(job()) == {}
    assert ways.device_options(job(weights="int8")) == {"INFERENCE_NUM_THREADS": 2}
    assert ways.device_options(job())["KV_CACHE_PRECISION"] == "f32"


def test_onnxruntime_genai_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ways_of("genai", monkeypatch)
    assert ways.speculative_block(job()) is None
    assert ways.speculative_block(job("model")) == {"max_draft_tokens": 5}
    adapting = {"max_draft_tokens": ways.MOST_ADAPTIVE, "min_adaptive_k": 1}
    assert ways.speculative_block(job("model", gamma=None)) == adapting
    for drafter, is_chained in (("lookup", False), ("chained-lookup", True)):
        block = {"max_draft_tokens": 5, "ngram_size": 3, "ngram_chained_lookup": is_chained}
        assert ways.speculative_block(job(drafter)) == block
    assert ways.parts_of(job("model")) == ("target", "draft")
    assert ways.parts_of(job("lookup")) == ways.parts_of(job()) == ("target",)


def test_llama_cpp_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ways_of("llamacpp", monkeypatch)
    assert ways.lookup_options(job("lookup")) == {"max_ngram_size": 3, "num_pred_tokens": 5}
    assert ways.model_options(job())["n_ctx"] >= 3 + 7 + 5
    assert "type_k" in ways.model_options(job())
    assert "type_k" not in ways.model_options(job(weights="int8"))
