"""The record of the sweep as a part of docs/models.md, between two marks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from scripts.lab.sweep.record import BROKEN, EXPORTED, REFUSED, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_BEGIN, _END = "<!-- sweep -->", "<!-- end of sweep -->"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return what came of all architectures, in Markdown: those exported by name, those refused by reason."""
    exported = [one for one in outcomes.values() if one.outcome == EXPORTED]
    refused = [one for one in outcomes.values() if one.outcome == REFUSED]
    broken = [one.name for one in outcomes.values() if one.outcome == BROKEN]
    worst = max((one.difference or 0.0 for one in exported), default=0.0)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in refused:
        by_reason[_reason(one)].append(one.name)
    rows = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    return "\n".join(
        [
            f"Of {len(outcomes)} architectures {len(exported)} are exported, {len(refused)} refused, "
            f"{len(broken)} broken. Logits of those exported are within {worst:.1e} of the largest logit.",
            "",
            "| | architectures |",
            "|---|---|",
            f"| **exported** | {_names([one.name for one in exported])} |",
            *(f"| refused: {reason} | {_names(names)} |" for reason, names in rows),
            *([f"| **broken** | {_names(broken)} |"] if broken else []),
        ]
    )


def with_table(page: str, outcomes: Mapping[str, Outcome]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table(outcomes)}\n{_END}{after}"


def write_table(outcomes: Mapping[str, Outcome]) -> None:
    """Put the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(page, outcomes), encoding="utf-8")


def _reason(one: Outcome) -> str:
    """Return the reason without the names and numbers that differ between architectures."""
    reason = re.sub(r"^[\w-]+:? (the model )?", "", one.reason)
    reason = re.sub(r" \([^()]*\)", "", reason)
    return re.sub(r"\d+", "N", reason)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
