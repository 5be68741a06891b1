"""What files say, read again when they change; what cannot be read leaves the old in force."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from outrider.runtime.core.errors import ConfigError
from outrider.runtime.serving.security.files import Stamp, stamp_of

T = TypeVar("T")

log = logging.getLogger(__name__)


class WatchedFile(Generic[T]):
    """What some files say, as of the last ``look``.

    Args:
        name: of the files together, for log and metrics.
        paths: to watch.
        read: returns what they say, or raises ConfigError; called at once.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self.name = name
        self._paths = paths
        self._read = read
        # Taken before the files are read: a change in between is seen at the next look.
        self._stamp = stamp_of(paths)
        self._value = read()
        # The failure that was told last, until the files could be used again.
        self._told: tuple[Stamp, str] | None = None

    def __call__(self) -> T:
        """Return what is in force."""
        return self._value

    def look(self) -> bool:
        """Read the files again if they have changed; return False where they have, and now cannot be used.

        They are tried at every look until they can be: what stood in the way may pass, and a key that was revoked may
        not stay in force for it. The same failure of the same files is told once.

        Safe beside readers in other threads: they see the old or the new, whole.
        """
        stamp = stamp_of(self._paths)
        if stamp == self._stamp:
            self._told = None
            return True
        try:
            self._value = self._read()
        except Exception as error:
            # Any, since libraries parse these files and no file may end a server; words of theirs may hold a secret.
            said = str(error) if isinstance(error, ConfigError) else type(error).__name__
            return not self._tell(stamp, said)
        self._stamp, self._told = stamp, None
        log.info("%s: read again", self.name)
        return True

    def _tell(self, stamp: Stamp, said: str) -> bool:
        """Log a failure; return whether it was new."""
        is_new, self._told = self._told != (stamp, said), (stamp, said)
        if is_new:
            log.error(
                "%s changed and cannot be used, what was read before stays: %s", self.name, said
            )
        return is_new
