"""Works the page in Chromium and prints what it came to, as JSON; for an interpreter that has playwright.

Its one argument is a JSON object: ``chromium``, the path of the browser; ``url``; ``steps``, a list of methods of
playwright's ``Page`` or of its parts, each with positional arguments and options, such as
``["fill", ["#prompt", "a"], {}]`` or ``["keyboard.press", ["Enter"], {}]``; and ``context``, options of
``Browser.new_page``, which may be left out.
"""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from typing import Any

from playwright.sync_api import Page, Request, sync_playwright

COLUMN = """root => ({
  state: root.dataset.state,
  error: root.querySelector(".error").hidden ? null : root.querySelector(".error").textContent,
  text: [...root.querySelectorAll(".answer .token:not(del)")].map(one => one.textContent).join(""),
  kinds: [...root.querySelectorAll(".answer .token")].map(one => one.classList[1]),
  num_passes: root.querySelectorAll(".pass").length,
  figures: Object.fromEntries([...root.querySelectorAll(".figures > div")].map(
    one => [one.dataset.figure, one.querySelector("dd").textContent])),
})"""
OUTCOME = """root => Object.fromEntries([...root.querySelectorAll("dd")].map(one => [one.id, one.textContent]))"""


def observe(page: Page) -> dict[str, Any]:
    """Return what the page shows."""
    return {
        "columns": {name: page.locator(f"#{name}").evaluate(COLUMN) for name in ("off", "on")},
        "outcome": page.locator("#comparison").evaluate(OUTCOME),
        "status": page.locator("#status").inner_text(),
        "model": page.locator("#model").inner_text(),
        "chart": page.locator("#chart").get_attribute("aria-label"),
        "width": page.evaluate("document.documentElement.scrollWidth"),
        "animations": page.evaluate("document.getAnimations().length"),
        "asks_key": page.locator("#key").is_visible(),
    }


def streams(requests: list[Request]) -> list[dict[str, str]]:
    """Return the completions that came to their end, each with what asked for it."""
    found = []
    for request in requests:
        response = request.response()
        if response is not None and request.failure is None:
            found.append({"request": request.post_data or "", "answer": response.text()})
    return found


def main() -> None:
    task = json.loads(sys.argv[1])
    console: list[str] = []
    errors: list[str] = []
    requests: list[Request] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=task["chromium"], args=["--no-sandbox"]
        )
        page = browser.new_page(**task.get("context", {}))
        page.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request))
        page.goto(task["url"])
        for verb, arguments, options in task["steps"]:
            attrgetter(verb)(page)(*arguments, **options)
        completions = [one for one in requests if one.url.endswith("/v1/completions")]
        seen = {
            **observe(page),
            "console": console,
            "errors": errors,
            "addresses": [one.url for one in requests],
            "streams": streams(completions),
        }
        print(json.dumps(seen))
        browser.close()


if __name__ == "__main__":
    main()
