"""TLS of the HTTP listener: by the server's certificate, whichever is current when a handshake begins."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.certificate import ServerCertificate, server_context
from outrider.runtime.serving.security.options import CertificateFiles

log = logging.getLogger(__name__)


def reloaded_context(
    files: CertificateFiles, current: Callable[[], ServerCertificate]
) -> Callable[[], ssl.SSLContext]:
    """Return what gives each connection its context, by the certificate and the clients' authorities that are current.

    A session is resumed within its context alone: after a change every client is checked again, at any version of TLS.

    Raises:
        ConfigError: the files have changed since they were checked.
    """
    last = current()
    try:
        newest = _without_tickets(server_context(files, last.client_ca))
    except (OSError, ValueError):
        raise ConfigError("tls_certificate", "must not change while the server starts") from None

    def choose() -> ssl.SSLContext:
        nonlocal last, newest
        certificate = current()
        if certificate is not last:
            last = certificate
            try:
                newest = _without_tickets(server_context(files, certificate.client_ca))
            except (OSError, ValueError):
                # They have changed once more since they were checked; the next look finds that.
                log.error("HTTP: the certificate's files cannot be read, the old one stays")
        return newest

    return choose


def _without_tickets(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that gives clients nothing to resume by which it would not know itself."""
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context
