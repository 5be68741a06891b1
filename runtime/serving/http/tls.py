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
) -> ssl.SSLContext:
    """Return a context whose handshakes take the certificate, and the clients' authorities, that are current.

    A handshake is looked at before it is answered, and moved to a newer context where there is one. What a client was
    once told is not resumed: its certificate would not be checked again.

    Raises:
        ConfigError: the files have changed since they were checked.
    """
    last = current()
    try:
        newest = first = server_context(files, last.client_ca)
    except (OSError, ValueError):
        raise ConfigError("tls_certificate", "must not change while the server starts") from None

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal last, newest
        certificate = current()
        if certificate is not last:
            last = certificate
            try:
                newest = server_context(files, certificate.client_ca)
            except (OSError, ValueError):
                # They have changed once more since they were checked; the next look finds that.
                log.error("HTTP: the certificate's files cannot be read, the old one stays")
        connection.context = newest

    first.sni_callback = choose
    first.options |= ssl.OP_NO_TICKET
    first.num_tickets = 0
    return first
