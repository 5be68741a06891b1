"""How the page is served: whole, with its headers, to anybody unless told otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.runtime.serving.http.pages import INDEX, read_pages

from tests.runtime.serving.security.credentials import bearer, key_security

WEB = Path(__file__).parents[4] / "runtime" / "serving" / "http" / "web"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def path_of(file: Path) -> str:
    return "/" if file.name == INDEX else f"/{file.name}"


async def test_every_file_is_answered_with_its_type_and_the_policy(start_http):
    async with start_http() as http:
        for file in WEB.iterdir():
            answer = await http.ask(path_of(file))
            assert (answer.status, answer.body) == (200, file.read_bytes())
            kind = answer.headers["content-type"]
            assert "javascript" in kind if file.suffix == ".js" else kind == KINDS[file.suffix]
            policy = answer.headers["content-security-policy"].split("; ")
            assert policy[0] == "default-src 'self'"
            assert {"frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"} < {*policy}
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        head = await http.ask("/", method="HEAD")
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(
    "path", ["/web/style.css", "/index.html", "/../gate.py", "/%2e%2e/gate.py", "//style.css"]
)
async def test_nothing_else_of_the_disk_has_a_path(start_http, path):
    async with start_http() as http:
        assert (await http.ask(path)).status == 404


async def test_strangers_get_the_page_and_nothing_that_it_asks_for(start_http, tmp_path: Path):
    security, keys = key_security(tmp_path)
    async with start_http(security=security) as http:
        for path in read_pages():
            assert (await http.ask(path)).status == 200
            assert (await http.ask(path, method="POST")).status == 401
        assert (await http.ask("/v1/models")).status == 401
        assert (await http.complete(prompt="a")).status == 401
        assert (await http.ask("/v1/models", **bearer(keys["x"]))).status == 200


async def test_where_health_is_closed_so_is_the_page(start_http, tmp_path: Path):
    security, keys = key_security(tmp_path, has_open_health=False)
    async with start_http(security=security) as http:
        for path in read_pages():
            assert (await http.ask(path)).status == 401
            assert (await http.ask(path, **bearer(keys["x"]))).status == 200
