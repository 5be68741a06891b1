"""The examples of docs/http.md, as somebody copies them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.environments import Environments
from tests.runtime.serving.chat.test_requests import chat_server

PAGE = (Path(__file__).parents[4] / "docs" / "http.md").read_text("utf-8")
HERE = "http://localhost:8000"


def block(language: str) -> str:
    """The text of the page's only block in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    return str(found)


async def said(*command: str | Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_examples_of_curl_are_answered(start_http):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = [one for one in block("bash").replace("\\\n", " ").splitlines() if one]
    async with start_http(**chat_server()) as http:
        for line in lines:
            answer = await said("bash", "-c", line.replace(HERE, f"http://127.0.0.1:{http.port}"))
            assert '"error"' not in answer, line
            if "-sN" in line:
                assert answer.endswith("data: [DONE]\n\n")
            else:
                json.loads(answer)


async def test_the_example_of_openais_client_runs(start_http, environments: Environments):
    python = environments.python("openai==3.57.0")
    async with start_http(**chat_server()) as http:
        script = block("python").replace(HERE, f"http://127.0.0.1:{http.port}")
        text, accepted = (await said(python, "-c", script)).splitlines()
    assert text and int(accepted) >= 0
