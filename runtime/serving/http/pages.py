"""The files of the page, kept in memory: what is not among them has no path."""

from __future__ import annotations

import mimetypes
from importlib import resources

from outrider.runtime.serving.http.responses import answer
from starlette.types import Receive, Scope, Send

INDEX = "index.html"
# Nothing inline and nothing from elsewhere; no frames, no form that sends itself, no other base of addresses.
_POLICY = b"default-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Page:
    """One file."""

    def __init__(self, name: str, body: bytes) -> None:
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        charset = "; charset=utf-8" if kind.startswith("text/") else ""
        self._headers = (*_HEADERS, (b"content-type", f"{kind}{charset}".encode()))
        self._body = body

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the file."""
        await answer(self._body, send, headers=self._headers)


def read_pages() -> dict[str, Page]:
    """Return the page's files by path, those of the folder ``web`` beside this file; none where there is none."""
    folder = resources.files("outrider.runtime.serving.http") / "web"
    if not folder.is_dir():
        return {}
    files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
    return {"/" if name == INDEX else f"/{name}": Page(name, body) for name, body in files.items()}
