"""Clients that nobody here wrote, each in an environment of its own, on a published model over HTTP.

Texts are those that the server gives whoever asks, and twenty of twenty objects have the eight fields of their schema.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from scripts.lab.soak.server import running_server
from tests.environments import Environments
from tests.real.conftest import Bundles

pytestmark = [pytest.mark.long, pytest.mark.real]
CLIENTS = Path(__file__).parent / "clients"
PYTHON = {
    "openai": ("openai==3.57.0",),
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "llm": ("llm==0.36",),
    "outlines": ("openai", "outlines==1.3.3"),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
}
VERCEL = ("@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7", "ai@7.0.173")
MOST_S = 900
NUM_PEOPLE = 20
FIELDS = {"name", "age", "job", "city", "country", "email", "hobby", "is_student"}
QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture(scope="module")
def url(bundle_of: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("ports") / "http"
    http = ("--http-port", "0", "--http-port-file", str(file), "--model-name", "coder")
    with running_server(bundle_of("qwen-coder-0.5b", "int8"), *http):
        yield f"http://127.0.0.1:{file.read_text().strip()}"


def told(command: list[object], **environment: str) -> dict[str, Any]:
    """Return what a client's script prints."""
    done = subprocess.run(
        [str(one) for one in command],
        env={**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def check(found: dict[str, Any], url: str) -> None:
    """Hold a client's texts against the server's own, and its objects against their schema."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 512,
        "temperature": 0,
    }
    asked = Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urlopen(asked, timeout=60.0) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    assert text.strip()
    for name in {"text", "streamed", "response"} & found.keys():
        assert found[name] == text, name
    for name in {"people", "called"} & found.keys():
        assert len(found[name]) == NUM_PEOPLE
        assert all(set(one) == FIELDS for one in found[name]), name
    assert found.keys() & {"text", "people"}


@pytest.mark.parametrize("name", PYTHON)
def test_a_client_in_python(name: str, url: str, environments: Environments) -> None:
    python = environments.python(*PYTHON[name])
    check(told([python, CLIENTS / f"client_{name}.py", url, "coder"]), url)


def test_vercels_client(url: str, environments: Environments) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    folder = environments.node(*VERCEL)
    people = environments.python("openai==3.57.0")
    schema = "import json, people; m = people.Person.model_json_schema()"
    line = (
        "print(json.dumps({'prompts': people.PROMPTS, 'question': people.QUESTION, 'schema': m}))"
    )
    asked = subprocess.run(
        [people, "-c", f"{schema}; {line}", url, "coder"],
        cwd=CLIENTS, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    check(
        told([node, CLIENTS / "client_vercel.mjs", url, "coder", asked], MODULES=str(folder)), url
    )
