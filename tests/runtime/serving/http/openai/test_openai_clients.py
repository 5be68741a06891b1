"""OpenAI's own clients, for Python and for Node, from environments of their own against a server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outrider import Client
from outrider.runtime.core.checks.limits import RequestLimits
from outrider.runtime.core.config import ServerConfig

from tests.environments import Environments
from tests.runtime.serving.chat.test_requests import TOKENIZER, chat_server
from tests.runtime.serving.http.client import Http
from tests.runtime.serving.security.credentials import key_security
from tests.runtime.serving.test_status import PATIENCE_S

CLIENTS = Path(__file__).parent / "clients"
MOST_TOKENS = 1_000_000
CONFIG = ServerConfig(
    max_queued=0, retry_after_s=0.05, max_unsent_chunks=MOST_TOKENS, lb_delay_s=0, drain_timeout_s=0
)


async def told(command: list[str | Path], http: Http, key: str, **variables: str) -> dict[str, Any]:
    """Return what a client prints that runs to its end, for a while of which the server is full."""
    process = await asyncio.create_subprocess_exec(
        *command,
        f"http://127.0.0.1:{http.port}",
        key,
        env={**os.environ, "PYTHONPATH": "", **variables},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    if await process.stdout.readline() != b"block\n":
        pytest.fail((await process.stderr.read()).decode())
    count = http.running.server.metrics.registry.get_sample_value
    async with Client(http.running.address, api_key=key) as client:
        # Both slots.
        blocking = client.generate("Hello", max_tokens=MOST_TOKENS, n=2, ignore_eos=True)
        await anext(blocking)
        process.stdin.write(b"\n")
        async with asyncio.timeout(PATIENCE_S):
            while not count("outrider_requests_refused_total", {"reason": "QUEUE_FULL"}):
                await client.info()
        await blocking.aclose()
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
async def http(start_http, tmp_path: Path):
    security, keys = key_security(tmp_path)
    async with start_http(
        **chat_server() | {"tokenizer": TOKENIZER.to_str().encode()},
        security=security,
        config=CONFIG,
        limits=replace(RequestLimits(), max_tokens=MOST_TOKENS),
        max_batch=2,
        max_context=MOST_TOKENS + 100,
    ) as found:
        yield found, keys["x"]


def check(found: dict[str, Any]) -> None:
    """Hold what both clients tell against what the server's model answers."""
    assert found["models"] == ["letters"]
    completion = found["completion"]
    # This tokenizer puts a token before each text.
    assert "".join(completion["tokens"]) == f"<|im_end|>{completion['text']}"
    assert completion["text"].startswith("Hello")
    usage = completion["usage"]
    assert usage["completion_tokens"] == 3 and usage["total_tokens"] == len(completion["tokens"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert found["last"] == [0, 4]
    assert found["not_found"] == ["NotFoundError", 404, "model_not_found", None]
    assert found["bad_field"] == ["BadRequestError", 400, "invalid_parameter", "temperature"]
    assert found["no_key"] == ["AuthenticationError", 401, "unauthenticated", None]
    assert found["mid_stream"][:2] == ["APIError", "deadline"]
    assert "the request's deadline passed" in found["mid_stream"][2]
    assert found["retried"] == 2


async def test_the_python_client(http, environments: Environments):
    python = environments.python("openai==3.57.0")
    server, key = http
    found = await told([python, CLIENTS / "openai_client.py"], server, key)
    check(found)
    tops, values = found["completion"]["tops"], found["completion"]["values"]
    assert tops[0] is None and values[0] is None
    assert all(value in top.values() for value, top in zip(values[1:], tops[1:], strict=True))
    assert found["completion"]["request_id"]
    assert found["chat"] == [found["streamed"]] * 2
    assert len(found["chat_logprobs"]) == 4 and max(found["chat_logprobs"]) <= 0.0
    assert found["roles"][0] == "assistant"
    assert found["form"]["a"] in (1, 2)


async def test_the_node_client(http, environments: Environments):
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    modules = environments.node("openai@7.57.0") / "node_modules"
    server, key = http
    script = CLIENTS / "openai_client.cjs"
    check(await told([node, script], server, key, NODE_PATH=str(modules)))
