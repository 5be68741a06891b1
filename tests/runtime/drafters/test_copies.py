"""Rows that steps copy field by field, because ``dataclasses.replace`` is slower: no field may be forgotten."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from typing import Any

from outrider.engines.sampling.base import SamplingRow
from outrider.runtime.drafters.base import DraftRow


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


def test_a_row_after_a_commit_keeps_all_but_its_tokens() -> None:
    row, sampling = marked(DraftRow), object()
    assert row.after(sampling) == replace(row, sampling=sampling)
