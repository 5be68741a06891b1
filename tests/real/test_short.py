"""The gate's look at a published model: SmolLM2-135M-Instruct, exported by the command, answers as Transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from outrider import SamplingParams
from outrider.runtime.offline.llm import LLM

from scripts.tools.smollm2 import NotDownloadedError
from tests.real.smollm2 import NUM_TOKENS, RECORDED, make_folder

pytestmark = pytest.mark.real
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Its bundles by their weights, made side by side."""
    root = tmp_path_factory.mktemp("smollm2")
    try:
        make_folder(root / "model")
    except NotDownloadedError as error:
        pytest.skip(f"no real models: {error}")
    command = [sys.executable, "-m", "outrider.runtime.cli", "export", "--max-context", "512"]
    bundles = {"float32": root / "float32", "int8": root / "int8"}
    options = {"float32": (), "int8": ("--weights", "int8", "--max-tree-nodes", "0")}
    # Else threads of one that wait take the processor from the other.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    running = [
        subprocess.Popen(
            [*command, "--target", root / "model", "--out", bundle, *options[weights]],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for weights, bundle in bundles.items()
    ]  # fmt: skip
    for one in running:
        told, _ = one.communicate()
        assert one.returncode == 0, told
    return bundles


def test_answers_are_those_that_transformers_gave(exported: Mapping[str, Path]) -> None:
    *recorded, chat = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    with LLM(exported["float32"], device="cpu", drafter="lookup", gamma=4) as llm:
        found = llm.generate([one["prompt"] for one in recorded], GREEDY)
        chatted = llm.chat(chat["messages"], GREEDY)
    told = [list(one.outputs[0].token_ids) for one in [*found, *chatted]]
    assert told == [one["answer"] for one in [*recorded, chat]]
    assert chatted[0].outputs[0].finish_reason == "stop"
    assert "Paris" in chatted[0].text


def test_drafts_change_no_token_of_stored_weights(exported: Mapping[str, Path]) -> None:
    recorded = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines()[:-1])
    prompts = [one["prompt"] for one in recorded]
    found = []
    for gamma, max_running in ((0, 1), (4, 8)):
        with LLM(
            exported["int8"], device="cpu", drafter="lookup", gamma=gamma, max_running=max_running
        ) as llm:
            answers = llm.generate(prompts, GREEDY)
        found.append([one.outputs[0].token_ids for one in answers])
    assert found[0] == found[1]
    assert sum(one.outputs[0].speculation is not None for one in answers) == len(prompts)
