"""English messages and their translations, from the message catalogues installed on a machine.

Programs bring their translations as GNU catalogues, ``/usr/share/locale/<language>/LC_MESSAGES/*.mo``. Lists of names
(``iso_*``) are left out, and so are messages that translate to themselves or are too short to say anything.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

LOCALES = Path("/usr/share/locale")
_MAGIC = 0x950412DE
_HEADER = struct.Struct("<7I")
_ENTRY = struct.Struct("<2I")
_SHORTEST = 8  # characters
_CONTEXT_ENDS = "\x04"


def catalogue_files(locales: Path, language: str) -> list[Path]:
    """Catalogues of a language below ``locales``, sorted, relative to it; lists of names are left out."""
    found = (locales / language / "LC_MESSAGES").glob("*.mo")
    return sorted(path.relative_to(locales) for path in found if not path.name.startswith("iso_"))


def messages(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Original and translation of every entry of a catalogue; forms of the plural stand behind a zero byte.

    Raises:
        ValueError: ``data`` is no catalogue in little-endian order.

    Source: GNU gettext manual, section 10.3, "The Format of GNU MO Files".
    """
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != _MAGIC:
        raise ValueError("no message catalogue in little-endian order")
    _, _, count, originals, translations, _, _ = _HEADER.unpack_from(data)
    for index in range(count):
        texts = []
        for table in (originals, translations):
            length, offset = _ENTRY.unpack_from(data, table + index * _ENTRY.size)
            texts.append(data[offset : offset + length])
        yield texts[0], texts[1]


def message_pairs(path: Path) -> dict[str, str]:
    """The messages of one catalogue with their translations; empty where it is not written in UTF-8."""
    try:
        entries = [(a.decode(), b.decode()) for a, b in messages(path.read_bytes())]
    except UnicodeDecodeError:
        return {}
    pairs = {}
    for originals, translations in entries:
        original = originals.split(_CONTEXT_ENDS)[-1].split("\0")[0]
        translation = translations.split("\0")[0]
        if translation and translation != original and len(original) >= _SHORTEST:
            pairs[original] = translation
    return pairs
