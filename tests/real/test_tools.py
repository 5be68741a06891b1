"""Calls of tools by a published model: required ones always come, and drafts change no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from outrider import SyncClient

from scripts.lab.soak.server import running_server
from tests.real.conftest import Bundles

pytestmark = [pytest.mark.long, pytest.mark.real]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in (
        ("get_weather", "Get the current weather of a city", WEATHER),
        ("add", "Add two whole numbers", NUMBERS),
    )
]
CITIES = ["Paris", "London", "Berlin", "Tokyo", "Rome", "Madrid", "Oslo", "Cairo", "Lima", "Delhi"]
PROMPTS = [
    *(f"What is the weather in {city} in celsius?" for city in CITIES),
    *(f"What is {7 * i + 3} plus {13 * i + 5}? Use the tool." for i in range(10)),
]
CHOICES: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": "required", "tool_name": "get_weather"},
    "auto": {"tool_choice": "auto"},
}
LEAST = {"required": 20, "named": 20, "auto": 8}


def answer(
    client: SyncClient, prompt: str, **options: Any
) -> tuple[str, dict[int, tuple[str, str]]]:
    """Return the text and the calls, by index, of a greedy answer."""
    text, calls = "", dict[int, tuple[str, str]]()
    for one in client.generate(
        messages=[{"role": "user", "content": prompt}],
        tools=TOOLS,
        parse_answer=True,
        temperature=0.0,
        max_tokens=128,
        **options,
    ):
        text += one.text
        for piece in one.tool_calls:
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (name + piece.name, arguments + piece.arguments)
    return text, calls


def test_twenty_prompts_of_two_tools_are_called_alike_with_drafts_and_without(
    bundle_of: Bundles,
) -> None:
    bundle = bundle_of("qwen-coder-0.5b", "int8")
    num_called = dict.fromkeys(CHOICES, 0)
    with running_server(bundle) as server, SyncClient(server.address) as client:
        assert client.info().chat.tool_call_format == "hermes"
        for kind, options in CHOICES.items():
            for prompt in PROMPTS:
                drafted = {"drafter": "suffix", "gamma": 4}
                found = answer(client, prompt, **options, speculation=drafted)
                assert answer(client, prompt, **options, speculation={"enabled": False}) == found
                calls = [(name, json.loads(text)) for name, text in found[1].values()]
                assert all(name in ("get_weather", "add") for name, _ in calls)
                assert all(set(given) in ({"city", "unit"}, {"a", "b"}) for _, given in calls)
                num_called[kind] += bool(calls)
    assert all(num_called[kind] >= least for kind, least in LEAST.items()), num_called
