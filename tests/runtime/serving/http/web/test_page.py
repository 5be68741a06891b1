"""The page in a real Chromium: what it shows is what the server streamed, its errors are the server's words.

Part of ``scripts/test --long``: it needs Debian's chromium, and playwright from an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.environments import Environments
from tests.runtime.conftest import ANY_LIMITS, ENDLESS_TOKENS, ENDS_AT_ONCE
from tests.runtime.grammar.test_serving import TOKENIZER, draft_of, target_of
from tests.runtime.serving.security.credentials import key_security

DRIVER = Path(__file__).with_name("browser.py")
PLAYWRIGHT = "playwright==1.65.2"
CHROMIUM = shutil.which("chromium")
END = "</s>"
"""An end token is shown, and is no part of the text."""
DASH = "\N{EN DASH}"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]

Step: TypeAlias = tuple[str, list[str], dict[str, Any]]
Browse: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]


def fill(**values: str) -> list[Step]:
    return [("fill", [f"#{name.replace('_', '-')}", value], {}) for name, value in values.items()]


def click(selector: str) -> Step:
    return ("click", [selector], {})


def wait_for(selector: str) -> Step:
    return ("wait_for_selector", [selector], {})


def run_to(state: str, column: str = "on") -> list[Step]:
    """Press Run, and wait until a column has come to a state and nothing runs any more."""
    return [click("#run"), wait_for(f"#{column}[data-state={state}]"), wait_for("#abort:disabled")]


@pytest.fixture
def browse(environments: Environments) -> Browse:
    """Works the page at a port by steps, and returns what it came to."""
    python = environments.python(PLAYWRIGHT)

    async def begin(port: int, *steps: Step, **context: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{port}/"
        task = {"chromium": CHROMIUM, "url": url, "steps": steps, "context": context}
        process = await asyncio.create_subprocess_exec(
            python, DRIVER, json.dumps(task), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        seen: dict[str, Any] = json.loads(out)
        assert seen["errors"] == []
        assert [one for one in seen["addresses"] if not one.startswith(url)] == []
        return seen

    return begin


def chunks(stream: dict[str, str]) -> list[dict[str, Any]]:
    """Return what was streamed, but for its mark of the end."""
    lines = [line for line in stream["answer"].split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def expected_kinds(stream: dict[str, str]) -> Counter[str]:
    """Count the tokens of a stream by where they came from, and the drafts that were not kept."""
    found = [chunk["outrider"] for chunk in chunks(stream) if "outrider" in chunk]
    kinds = Counter(token["provenance"] for one in found for token in one.get("tokens", ()))
    steps = [step for one in found for step in one.get("steps", ())]
    kinds["dropped"] = sum(step["gamma"] - step["num_accepted"] for step in steps)
    kinds["passes"] = len(steps)
    return kinds


def shown_kinds(column: dict[str, Any]) -> Counter[str]:
    """Count the page's tokens likewise: what nothing was drafted for is a bonus to the server."""
    names = {"plain": "bonus", "rejected": "dropped", "behind": "dropped"}
    kinds = Counter(names.get(kind, kind) for kind in column["kinds"])
    kinds["passes"] = column["num_passes"]
    return kinds


def assert_shows_what_came(seen: dict[str, Any]) -> None:
    assert len(seen["streams"]) == 2
    for stream in seen["streams"]:
        is_on = json.loads(stream["request"])["speculation"]["enabled"]
        column = seen["columns"]["on" if is_on else "off"]
        assert +shown_kinds(column) == +expected_kinds(stream)
        assert column["text"].removesuffix(END) == "".join(
            c["text"] for one in chunks(stream) for c in one["choices"]
        )
        report = chunks(stream)[-1]["outrider"]["speculation"]
        alpha = DASH if report["alpha_hat"] is None else f"{report['alpha_hat']:.2f}"
        assert column["figures"]["alpha"] == alpha
        assert column["figures"]["tokens"] == str(
            sum(len(one["outrider"]["tokens"]) for one in chunks(stream))
        )


@pytest.mark.parametrize("order", ["sequential", "together"])
async def test_greedy_answers_are_shown_token_by_token_and_are_identical(start_http, browse, order):
    steps = [
        *fill(prompt="a", gamma="3"),
        ("select_option", ["#order", order], {}),
        *run_to("done"),
    ]
    async with start_http() as http:
        seen = await browse(http.port, *steps)
    assert_shows_what_came(seen)
    off, on = seen["columns"]["off"], seen["columns"]["on"]
    assert off["text"] == on["text"] != ""
    assert {"accepted", "rejected", "recovered", "bonus"} <= set(on["kinds"])
    assert set(off["kinds"]) == {"plain"}
    assert seen["outcome"]["identical"] == "yes"
    assert seen["outcome"]["passes"] == f"{on['num_passes']} instead of {off['num_passes']}"
    assert off["figures"]["tokens per pass"] == "1.00"
    assert on["num_passes"] < off["num_passes"] == 96
    assert seen["model"] == "letters"
    assert seen["chart"].startswith(f"{on['num_passes']} passes")
    assert seen["console"] == []


async def test_seed_stable_answers_are_identical_at_any_temperature(start_http, browse):
    steps = [
        *fill(prompt="a", temperature="2", seed="5"),
        ("check", ["#seed-stable"], {}),
        *run_to("done"),
    ]
    async with start_http() as http:
        seen = await browse(http.port, *steps)
    assert_shows_what_came(seen)
    assert seen["columns"]["off"]["text"] == seen["columns"]["on"]["text"] != ""
    assert seen["outcome"]["identical"] == "yes"
    assert seen["console"] == []


async def test_nothing_is_promised_of_two_draws(start_http, browse):
    async with start_http() as http:
        seen = await browse(http.port, *fill(prompt="a", temperature="2"), *run_to("done"))
    assert_shows_what_came(seen)
    assert seen["outcome"]["identical"] == "not promised"


async def test_tokens_that_the_form_forces_are_marked(start_http, browse):
    constraint = {"prompt": "abc", "regex": "(ab|ba)cdefghij0[0-9]", "gamma": "2"}
    async with start_http(target=target_of, draft=draft_of, tokenizer=TOKENIZER) as http:
        seen = await browse(http.port, *fill(**constraint), *run_to("done"))
    assert_shows_what_came(seen)
    assert "forced" in seen["columns"]["on"]["kinds"]
    assert "cdefghij0" in seen["columns"]["on"]["text"]


async def test_a_key_is_asked_for_and_used(start_http, browse, tmp_path):
    security, keys = key_security(tmp_path)
    async with start_http(security=security) as http:
        seen = await browse(http.port, wait_for("#key"), *fill(prompt="a"), *run_to("ended", "off"))
        assert seen["columns"]["off"]["error"].startswith("401 unauthenticated: ")
        assert seen["columns"]["on"]["state"] == "not run"
        assert seen["asks_key"]
        with_key = [wait_for("#key"), *fill(prompt="a", key=keys["x"]), *run_to("done")]
        seen = await browse(http.port, *with_key)
    assert_shows_what_came(seen)
    assert seen["model"] == "letters"
    assert all(" 401 " in line for line in seen["console"])
    assert keys["x"] not in json.dumps(seen)


async def test_a_full_queue_is_told_in_the_servers_words(start_http, browse):
    config = replace(ENDS_AT_ONCE, max_queued=0, retry_after_s=2.0)
    async with start_http(
        config=replace(config, max_unsent_chunks=ENDLESS_TOKENS),
        limits=replace(ANY_LIMITS, max_tokens=ENDLESS_TOKENS),
        max_context=ENDLESS_TOKENS,
        max_batch=1,
    ) as http:
        first = http.running.endless()
        await anext(first)
        seen = await browse(http.port, *fill(prompt="a"), *run_to("ended", "off"))
        await first.aclose()
    error = seen["columns"]["off"]["error"]
    assert error.startswith("429 rate_limit_exceeded: ")
    assert error.endswith("(again in 2 s)")
    assert all(" 429 " in line for line in seen["console"])


async def test_a_server_that_is_stopping_says_so(start_http, browse):
    async with start_http() as http:
        http.running.server.readiness.handler.close_admission()
        seen = await browse(http.port, *fill(prompt="a"), *run_to("ended", "off"))
    assert seen["columns"]["off"]["error"].startswith("503 draining: ")


async def test_an_error_in_the_middle_keeps_what_has_come(start_http, browse, caplog):
    caplog.set_level(logging.CRITICAL)
    async with start_http(failing_extends=range(6, 20)) as http:
        seen = await browse(http.port, *fill(prompt="a"), *run_to("ended", "off"))
    off = seen["columns"]["off"]
    assert off["error"].startswith("engine_failed: ")
    assert off["text"].startswith("bcd")
    assert (off["state"], seen["columns"]["on"]["state"]) == ("ended", "not run")
    assert seen["outcome"] == {"speed-up": DASH, "passes": DASH, "identical": DASH}
    assert seen["console"] == []


async def test_what_the_server_refuses_is_named(start_http, browse):
    async with start_http() as http:
        seen = await browse(http.port, *fill(prompt="a", drafter="nobody"), *run_to("ended"))
    assert seen["columns"]["off"]["state"] == "done"
    assert "speculation.drafter" in seen["columns"]["on"]["error"]


async def test_abort_ends_the_request_at_the_server(start_http, browse):
    async with start_http(
        config=replace(ENDS_AT_ONCE, max_unsent_chunks=ENDLESS_TOKENS),
        limits=replace(ANY_LIMITS, max_tokens=ENDLESS_TOKENS),
        max_context=ENDLESS_TOKENS,
    ) as http:
        endless = fill(prompt="a", max_tokens=str(ENDLESS_TOKENS - 1))
        begun = [click("#run"), wait_for("#off .token")]
        ended = [click("#abort"), wait_for("#off[data-state=ended]"), wait_for("#abort:disabled")]
        seen = await browse(http.port, *endless, *begun, *ended)
        async with asyncio.timeout(20):
            await http.running.server.readiness.handler.wait_idle()
    assert seen["columns"]["off"]["error"] == "Aborted."
    assert seen["columns"]["on"]["state"] == "not run"
    assert seen["status"] == "Ended without both answers."
    assert seen["console"] == []


async def test_a_run_works_by_keys_alone_in_the_dark_on_a_narrow_screen(start_http, browse):
    context = {
        "viewport": {"width": 360, "height": 640},
        "color_scheme": "dark",
        "reduced_motion": "reduce",
    }
    keys: list[Step] = [
        ("focus", ["#prompt"], {}),
        ("keyboard.press", ["Control+A"], {}),
        ("keyboard.type", ["a"], {}),
        ("focus", ["#seed"], {}),
        ("keyboard.press", ["Enter"], {}),
        wait_for("#on[data-state=done]"),
        wait_for("#abort:disabled"),
    ]
    async with start_http() as http:
        seen = await browse(http.port, *keys, **context)
    assert_shows_what_came(seen)
    assert seen["width"] <= 360
    assert seen["animations"] == 0
