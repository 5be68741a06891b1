"""One server's security: authentication, certificates and tenants out of files, which are read again when they change.

Everything is read once before the server starts, so that what cannot be used is said in a line then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.addresses import (
    UNIX,
    check_exposed,
    is_reachable,
    owners_sockets,
    prepare_socket,
)
from outrider.runtime.serving.security.authenticator import Authenticator, Credentials
from outrider.runtime.serving.security.certificate import (
    ServerCertificate,
    read_certificate,
    server_credentials,
)
from outrider.runtime.serving.security.files import read_text
from outrider.runtime.serving.security.keys import parse_keys
from outrider.runtime.serving.security.options import SecurityOptions
from outrider.runtime.serving.security.places import Places
from outrider.runtime.serving.security.reload import WatchedFile
from outrider.runtime.serving.security.tenants import Tenants, parse_tenants
from outrider.runtime.serving.security.tokens import TokenKeys, parse_key_set

REMIND_EVERY_S = 3600.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Security:
    """Who may come in by which address.

    Args:
        options: as the server was started with.
        reload_failed: told the name of files that have changed and cannot be used.

    Attributes:
        places: who keeps a connection.

    Raises:
        ConfigError: a file cannot be used.
        ModuleNotFoundError: a library of the extra ``auth`` is missing.
    """

    def __init__(
        self,
        options: SecurityOptions | None = None,
        reload_failed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._options = options = options or SecurityOptions()
        self._reload_failed = reload_failed
        self._files: list[WatchedFile[Any]] = []
        self.certificate = self._certificate(options)
        self._tenants = self._read_tenants(options)
        self.authenticator = Authenticator(self._credentials(options), self._tenants or Tenants)
        self.places = Places(proxies=options.proxies)
        self._exposed: list[str] = []
        self._reminded_s = -REMIND_EVERY_S

    @property
    def options(self) -> SecurityOptions:
        """Return the options it was made from."""
        return self._options

    @property
    def is_listed(self) -> Callable[[str], bool] | None:
        """Whether the file of tenants names one; None where there is no file."""
        tenants = self._tenants
        return None if tenants is None else lambda name: name in tenants().rules

    def check(self, key: str, address: str) -> None:
        """Refuse an address that has to have TLS; see ``addresses.check_exposed``."""
        has_tls = self.certificate is not None
        check_exposed(key, address, has_tls=has_tls, is_insecure=self._options.is_insecure)
        if is_reachable(address) and not has_tls:
            self._exposed.append(address)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen on an address and return the bound port; 0 for a Unix socket, which is its owner's.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            if address.startswith(UNIX):
                prepare_socket("uds", Path(address.removeprefix(UNIX)))
                with owners_sockets():
                    server.add_insecure_port(address)
                return 0
            if self.certificate is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, server_credentials(self.certificate)))
        except RuntimeError as error:
            rule = f"must be an address of this machine with a free port; {address} is not"
            raise ConfigError("host", rule) from error

    async def watch(self) -> None:
        """Read files again that change, and say every hour that callers are without TLS, until cancelled."""
        while True:
            self.remind(time.monotonic())
            await asyncio.sleep(self._options.reload_every_s)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read again what has changed."""
        for file in self._files:
            if not file.look():
                self._reload_failed(file.name)

    def remind(self, now_s: float) -> None:
        """Say that other machines may connect without TLS, at most once an hour."""
        if self._exposed and now_s - self._reminded_s >= REMIND_EVERY_S:
            self._reminded_s = now_s
            log.warning("insecure: no TLS on %s, so anybody on the way can read", self._exposed)

    def _certificate(self, options: SecurityOptions) -> WatchedFile[ServerCertificate] | None:
        files = options.certificate_files
        if files is None:
            return None
        return self._reloaded("tls", files.paths, lambda: read_certificate(files))

    def _credentials(self, options: SecurityOptions) -> Credentials:
        keys = tokens = None
        if (path := options.keys) is not None:
            keys = self._reloaded(
                "keys", [path], lambda: parse_keys(read_text("keys", path, is_secret=True))
            )
        if (key_set := options.jwt_keys) is not None:
            tokens = self._reloaded("jwt_keys", [key_set], lambda: _token_keys(key_set, options))
        has_certificates = options.tls_client_ca is not None
        return Credentials(keys=keys, tokens=tokens, has_certificates=has_certificates)

    def _read_tenants(self, options: SecurityOptions) -> WatchedFile[Tenants] | None:
        path = options.tenants
        if path is None:
            return None
        return self._reloaded("tenants", [path], lambda: parse_tenants(read_text("tenants", path)))

    def _reloaded(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> WatchedFile[T]:
        reloaded = WatchedFile(name, paths, read)
        self._files.append(reloaded)
        return reloaded


def _token_keys(path: Path, options: SecurityOptions) -> TokenKeys:
    keys = parse_key_set(read_text("jwt_keys", path))
    audience, claim = options.jwt_audience or "", options.jwt_tenant_claim
    return TokenKeys(keys, audience=audience, tenant_claim=claim)
