"""Rows that steps copy field by field, because ``dataclasses.replace`` is slower: no field may be forgotten."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from typing import Any

from outrider.engines.sampling.base import SamplingRow


def marked(kind: type[Any]) -> Any:
    """A row each of whose fields holds an object of its own."""
    return kind(**{field.name: object() for field in fields(kind)})


def test_a_row_with_a_draft_keeps_all_that_is_no_part_of_a_draft() -> None:
    row = marked(SamplingRow)
    parts = [name for name in signature(SamplingRow.with_draft).parameters if name != "self"]
    draft = {name: object() for name in parts}
    assert row.with_draft(**draft) == replace(row, **draft)
    bare = row.with_draft(())
    assert not any(getattr(bare, name) for name in parts)
