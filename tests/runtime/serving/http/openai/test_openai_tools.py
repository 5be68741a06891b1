"""Calls, reasoning and responses as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import json

from tests.environments import Environments
from tests.runtime.serving.chat.scripted import TOOLS
from tests.runtime.serving.http.openai.test_openai_clients import CLIENTS
from tests.runtime.serving.http.openai.test_tools import CALL, OTHER
from tests.runtime.serving.http.openai.test_tools import start_writing as start_writing


async def test_the_python_client_reads_calls_reasoning_and_responses(
    start_writing, environments: Environments
) -> None:
    python = environments.python("openai==3.57.0")
    async with start_writing(f"<think>hm</think>\n\nSo:\n{CALL}\n{OTHER}") as http:
        process = await asyncio.create_subprocess_exec(
            python,
            CLIENTS / "openai_tools.py",
            f"http://127.0.0.1:{http.port}",
            json.dumps(TOOLS),
            env={"PYTHONPATH": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(out)
    calls = [["weather", {"city": "Rome"}], ["weather_more", {"a": 12, "b": 1}]]
    assert found["whole"] == found["streamed"] == ["So:", "hm", calls, "tool_calls"]
    assert "tool_calls.function.arguments.done" in found["kinds"]
    assert found["again"] == "So:"
    items = ["reasoning", "message", "function_call", "function_call"]
    assert found["response"] == found["final"] == items
    assert found["text"] == ["So:"] * 3
    assert found["types"][0] == "response.created" and found["types"][-1] == "response.completed"
    assert found["types"].count("response.output_item.done") == len(items)
