"""Writes one self-contained HTML page of tables and pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATE = "page.html.j2"
PAGE = "index.html"
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with an optional text, table and pictures.

    Attributes:
        rows: cells as text, as many as ``heads``.
        pictures: PNG files, embedded in the page.
    """

    title: str
    text: str = ""
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[Path, ...] = field(default=())

    @property
    def images(self) -> list[tuple[str, str]]:
        """Return name and base64 of each picture."""
        return [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in self.pictures]


def table(
    title: str, text: str, rows: Iterable[R], columns: Mapping[str, Callable[[R], object]]
) -> Section:
    """Return a section with a table: a line per row, and per column its heading and what it shows of a row."""
    cells = tuple(tuple(str(show(row)) for show in columns.values()) for row in rows)
    return Section(title=title, text=text, heads=tuple(columns), rows=cells)


def number(value: float | None) -> str:
    """Return a number in two decimals; a dash for none."""
    return "-" if value is None else f"{value:.2f}"


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in; at the end its files are in ``folder``, or none where the block raises."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # Within: what lies beside may be another disk, or nobody's to write to.
        with TemporaryDirectory(prefix=".", dir=folder) as name:
            yield Path(name)
            for file in Path(name).iterdir():
                file.replace(folder / file.name)
    except BaseException:
        if is_new:
            with suppress(OSError):  # not empty: the move itself failed
                folder.rmdir()
        raise


def write_page(path: Path, *, title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write the page, which refers to no other file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(TEMPLATE).render(
        title=title, summary=summary, sections=sections
    )
    path.write_text(text, encoding="utf-8")
