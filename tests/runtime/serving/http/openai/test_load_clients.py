"""Evaluation and load tools that people point at OpenAI's protocol, from environments of their own.

Part of ``scripts/test --long``: the environments take minutes and gigabytes. Data are local files.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.environments import Environments
from tests.runtime.serving.chat.test_requests import TOKENIZER, chat_server
from tests.runtime.serving.http.client import Http

pytestmark = pytest.mark.long

CHOICES = [
    {"query": "abc", "choices": ["de", "dx", "zy"], "gold": 0},
    {"query": "Hello", "choices": ["qq", "pq"], "gold": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{query}}}}"
target_delimiter: ""
"""
LIKELIHOOD = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["i"], max_gen_toks: 20, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


async def run(command: list[str | Path], folder: Path) -> str:
    """Run a tool that reaches nothing but this machine, and return what it says."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-3000:]
    return said.decode()


def write_lines(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return path


def samples_of(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


async def scored(http: Http, text: str) -> list[float]:
    """The log-probabilities of a text's tokens, but for the first, by gRPC."""
    ids = [TOKENIZER.token_to_id(one) for one in text]
    output = await http.running.client.complete(ids, prompt_logprobs=0, max_tokens=0, echo=True)
    assert output.prompt_logprobs is not None
    return [one[i] for i, one in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if one]


async def test_lm_eval_scores_likelihoods_and_generates(
    start_http, environments: Environments, tmp_path: Path
):
    python = environments.python("lm-eval[api]==0.4.13")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = write_lines(tmp_path / "choices.jsonl", CHOICES)
    text = TASK.format(name="choice", data=data) + LIKELIHOOD
    (tasks / "choice.yaml").write_text(text)
    data = write_lines(tmp_path / "texts.jsonl", [{"query": "abc", "answer": "defgh"}])
    text = TASK.format(name="texts", data=data) + GENERATION
    (tasks / "texts.yaml").write_text(text)
    async with start_http(**chat_server()) as http:
        url = f"http://127.0.0.1:{http.port}/v1/completions"
        arguments = f"base_url={url},model=letters,tokenizer_backend=remote,num_concurrent=2"
        tool = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        what = ["--tasks", "choice,texts", "--include_path", tasks, "--log_samples"]
        await run([*tool, *what, "--output_path", tmp_path / "out"], tmp_path)
        for sample in samples_of(tmp_path / "out", "choice"):
            document = sample["doc"]
            for choice, (found, is_greedy) in zip(
                document["choices"], sample["filtered_resps"], strict=True
            ):
                values = await scored(http, document["query"] + choice)
                expected = math.fsum(values[-len(choice) :])
                assert float(found) == pytest.approx(expected, abs=1e-9)
                is_best = document["choices"].index(choice) == document["gold"]
                assert (str(is_greedy) == "True") is is_best
    assert all(one["acc"] == 1.0 for one in samples_of(tmp_path / "out", "choice"))
    assert [one["exact_match"] for one in samples_of(tmp_path / "out", "texts")] == [1.0]


async def test_guidellm_loads_the_server(start_http, environments: Environments, tmp_path: Path):
    python = environments.python("guidellm==0.8.1", "torch==2.13.0", "transformers==5.23.0")
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": "Hello"}, {"prompt": "abc"}] * 3)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    TOKENIZER.save(str(tokenizer / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(kind))
    async with start_http(**chat_server()) as http:
        target = f"target=http://127.0.0.1:{http.port},model=letters"
        said = await run(
            [
                *(python.parent / "guidellm", "run", "--profile", "kind=synchronous"),
                *("--backend", f"kind=openai_http,{target},request_format=/v1/completions"),
                *("--constraint", "kind=max_requests,count=4"),
                *("--data", f"kind=json_file,path={prompts}"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            ],
            tmp_path,
        )
        count = http.running.server.metrics.registry.get_sample_value
        assert "Benchmarking complete" in said
        assert count("outrider_requests_finished_total", {"code": "OK", "reason": "length"}) >= 4.0
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 4
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
