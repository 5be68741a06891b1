"""The record of the sweep as a part of docs/models.md, between two marks."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from scripts.lab.sweep.record import BROKEN, EXPORTED, REFUSED, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_PAGE_WIDTH = 120
_BEGIN, _END = "<!-- sweep -->", "<!-- end of sweep -->"


def reads_images(name: str) -> bool:
    """Return whether an architecture is of models that read images too, and not among the causal ones."""
    return (
        name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return what came of all architectures, in Markdown: those exported by name, those refused by reason."""
    exported = [one for one in outcomes.values() if one.outcome == EXPORTED]
    parts = [one.name for one in exported if reads_images(one.name)]
    causal = [one.name for one in exported if not reads_images(one.name)]
    refused = [one for one in outcomes.values() if one.outcome == REFUSED]
    broken = [one.name for one in outcomes.values() if one.outcome == BROKEN]
    num_wholes = sum(map(reads_images, outcomes))
    worst = max((one.difference or 0.0 for one in exported), default=0.0)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in refused:
        by_reason[f"refused: {_reason(one)}"].append(one.name)
    by_size = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    rows = [
        ("**exported**", causal),
        ("**text part exported**", parts),
        *by_size,
        ("**broken**", broken),
    ]
    counted = (
        f"Of {len(outcomes) - num_wholes} causal architectures {len(causal)} are exported, and of {num_wholes} "
        f"others that read images the text parts of {len(parts)}; {len(refused)} are refused, {len(broken)} "
        f"broken. Logits of those exported are within {worst:.1e} of the largest logit."
    )
    return "\n".join(
        [
            *textwrap.wrap(counted, _PAGE_WIDTH),
            "",
            "| | architectures |",
            "|---|---|",
            *(f"| {what} | {_names(names)} |" for what, names in rows if names),
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
