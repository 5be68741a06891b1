"""What a call says of itself so that a balancer can send it where its prefix is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from outrider.options import Message

SESSION_KEY, PREFIX_KEY = "session_id", "outrider-prefix"
"""Metadata that Ray Serve knows sessions by; and that of a hash of what a prompt begins with."""


def affinity_metadata(
    *,
    session: str | None = None,
    prefix: str | Sequence[int] | Sequence[Message] | None = None,
    length: int = 256,
) -> dict[str, str]:
    """Return metadata for calls that are to go to one replica, for ``client.generate(..., metadata=...)``.

    Args:
        session: name of a session, for example of a conversation; it wins over the prefix.
        prefix: a prompt as it is sent: a text, token ids or messages. Prompts that begin alike have one hash.
        length: characters that count, of token ids and messages those of their JSON; of shorter prompts all.
    """
    metadata = {} if session is None else {SESSION_KEY: session}
    if prefix is not None:
        head = prefix if isinstance(prefix, str) else json.dumps([*prefix[:length]])
        metadata[PREFIX_KEY] = hashlib.sha256(head[:length].encode()).hexdigest()[:16]
    return metadata
