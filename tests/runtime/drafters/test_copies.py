"""Rows that steps copy field by field, because ``dataclasses.replace`` is slower: no field may be forgotten."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from outrider.runtime.drafters.base import DraftRow


def marked(kind: type[Any]) -> Any:
    """A row each of whose fields holds an object of its own."""
    return kind(**{field.name: object() for field in fields(kind)})


def test_a_row_after_a_commit_keeps_all_but_its_tokens() -> None:
    row, sampling = marked(DraftRow), object()
    assert row.after(sampling) == replace(row, sampling=sampling)
