"""How the client's commands reach a server: an address, and credentials from files, never from the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from outrider.runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider import Client, SyncClient

C = TypeVar("C")

DEFAULT_ADDRESS = "localhost:50051"
_PANEL = "Credentials"

Address = Annotated[str, typer.Option(help="Server, as HOST:PORT.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="OUTRIDER_API_KEY_FILE", rich_help_panel=_PANEL, help="File of a key or token."
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(rich_help_panel=_PANEL, help="PEM: who may have signed the server's certificate."),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(rich_help_panel=_PANEL, help="PEM: a certificate of one's own.")
]
TlsKey = Annotated[Path | None, typer.Option(rich_help_panel=_PANEL, help="PEM: its private key.")]
AllowInsecure = Annotated[
    bool,
    typer.Option(
        "--allow-insecure", rich_help_panel=_PANEL, help="Send the key elsewhere without TLS."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where a command's server is, and the files of what it is shown."""

    address: str
    api_key_file: Path | None = None
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allow_insecure: bool = False

    def open(self) -> Client:
        """Return a client.

        Raises:
            ConfigError: credentials that do not parse, or a key that would be sent in plain text.
            OSError: a file cannot be read.
        """
        from outrider import Client

        return self._opened(Client)

    def open_probe(self) -> SyncClient:
        """Return a client whose calls reach a server that says it is not serving; raises as ``open`` does."""
        from outrider import SyncClient
        from outrider.channel import PROBE_OPTIONS

        return self._opened(functools.partial(SyncClient, options=PROBE_OPTIONS))

    def _opened(self, kind: Callable[..., C]) -> C:
        key = None
        if self.api_key_file is not None:
            # What is no text is no key: the client refuses it in its own words.
            key = self.api_key_file.read_text(encoding="ascii", errors="replace").strip()
        try:
            return kind(
                self.address,
                api_key=key,
                tls_ca=self.tls_ca,
                tls_certificate=self.tls_certificate,
                tls_key=self.tls_key,
                allow_insecure=self.allow_insecure,
            )
        except ValueError as error:
            name, _, rule = str(error).partition(": ")
            raise ConfigError(name, rule) from error
