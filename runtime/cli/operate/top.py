"""``outrider top``: a live view of a server, from its metrics."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from outrider.runtime.cli.connection import (
    AllowInsecure,
    ApiKeyFile,
    TlsCa,
    TlsCertificate,
    TlsKey,
)
from outrider.runtime.cli.refusals import EXIT_UNAVAILABLE, end_on_sigterm, refusals
from outrider.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.runtime.cli.operate.frame import Scrape

UNIX = "unix:"
PATIENCE_S = 10.0
LOCAL = ("localhost", "127.0.0.1", "::1")
_URL_RULE = "must be http://HOST:PORT, https://HOST:PORT or unix:PATH"
_KEY = re.compile(r"[!-~]+")
# No user and password: they would be in the list of processes.
_ENDPOINT = re.compile(r"[^@:\[\]\s]+(:\d{1,5})?|\[[0-9a-fA-F:.]+\](:\d{1,5})?")


def top(
    metrics_url: Annotated[
        str,
        typer.Option(
            envvar="OUTRIDER_METRICS_URL",
            help="Metrics of outrider serve --metrics-address: http://HOST:PORT, https:// or unix:PATH.",
        ),
    ],
    interval_s: Annotated[
        float, typer.Option(min=0.1, help="Between two looks, and what rates are over.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Show what a server does, live: rates, queue, slots, latencies and what drafts gain."""
    from outrider.runtime.cli.operate.frame import Window, frame
    from rich.console import Console
    from rich.live import Live

    # So that the terminal is left as it was.
    end_on_sigterm()
    with refusals():
        source = Source(
            url=metrics_url,
            key="" if api_key_file is None else _key(api_key_file),
            tls_ca=tls_ca,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            allow_insecure=allow_insecure,
        )
        before = _scrape(source)
        time.sleep(interval_s)
        now = _scrape(source)
        if once:
            Console().print(frame(Window(before, now)))
            return
        with Live(frame(Window(before, now)), auto_refresh=False, screen=True) as shown:
            while True:
                time.sleep(interval_s)
                before, now = now, _scrape(source)
                shown.update(frame(Window(before, now)), refresh=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where metrics are read, and what is shown there.

    Raises:
        ConfigError: the URL is none, or a key would be sent in plain text.
    """

    url: str
    key: str = ""
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        if self.url.startswith(UNIX):
            return
        try:
            parts = urlsplit(self.url)
        except ValueError:
            raise ConfigError("metrics_url", _URL_RULE) from None
        if parts.scheme not in ("http", "https") or not _ENDPOINT.fullmatch(parts.netloc):
            raise ConfigError("metrics_url", _URL_RULE)
        is_plain = parts.scheme == "http" and parts.hostname not in LOCAL
        if self.key and is_plain and not self.allow_insecure:
            raise ConfigError(
                "metrics_url", "must be https for a key, or --allow-insecure be given"
            )

    def read(self) -> str:
        """Return the metrics as text.

        Raises:
            OSError: nobody answers, or not with metrics.
        """
        connection = self._connection()
        try:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise OSError(f"the answer is not HTTP ({type(error).__name__})") from error
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise OSError("a key with the scope metrics is needed: --api-key-file")
        if answer.status != 200:
            raise OSError(f"the answer has status {answer.status}")
        return text

    def _connection(self) -> http.client.HTTPConnection:
        if self.url.startswith(UNIX):
            return _UnixConnection(self.url.removeprefix(UNIX))
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
        context = ssl.create_default_context(cafile=self.tls_ca)
        if self.tls_certificate is not None:
            context.load_cert_chain(self.tls_certificate, self.tls_key)
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=PATIENCE_S, context=context
        )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


def _scrape(source: Source) -> Scrape:
    """Return a server's metrics now, or end the command in one line."""
    from outrider.runtime.cli.operate.frame import parse_scrape

    try:
        found = parse_scrape(source.read(), time.monotonic())
        if "outrider_build_info" not in found.samples:
            raise ValueError("these are no metrics of outrider serve")
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        typer.echo(f"outrider: no metrics at {source.url}: {said}", err=True)
        raise typer.Exit(EXIT_UNAVAILABLE) from error
    return found


def _key(file: Path) -> str:
    """Return the key of a file; what is refused is not told, as it may be a key with something behind it.

    Raises:
        ConfigError: it is none.
    """
    key = file.read_text(encoding="ascii", errors="replace").strip()
    if not _KEY.fullmatch(key):
        raise ConfigError("api_key", "must be printable ASCII letters without spaces")
    return key
