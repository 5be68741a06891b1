"""Bytes that say when nobody has them any more."""

from __future__ import annotations


class Freed(bytes):
    """Appends "freed" to a list at its end."""

    _noted: list[str]

    @classmethod
    def noting(cls, data: bytes, noted: list[str]) -> Freed:
        """These bytes, whose end is noted."""
        made = cls(data)
        made._noted = noted
        return made

    def __del__(self) -> None:
        self._noted.append("freed")
