"""What came of each architecture, in a file with a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = Path(__file__).parent / "architectures.jsonl"
EXPORTED, REFUSED, BROKEN = "exported", "refused", "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an architecture.

    Attributes:
        name: its ``model_type``.
        outcome: exported, refused, or broken.
        difference: the worst distance of an exported graph's logits from the checkpoint's, as a share of the largest
            logit; None of others.
        reason: why it was refused, or what broke; empty where exported.
    """

    name: str
    outcome: str
    difference: float | None = None
    reason: str = ""

    def as_line(self) -> dict[str, object]:
        """Return what a line of the record holds."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def read_record(path: Path = RECORD) -> dict[str, Outcome]:
    """Return what is known, by architecture; of several lines the last one counts."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one.name: one for one in (Outcome(**json.loads(line)) for line in lines)}


def write_record(outcomes: Mapping[str, Outcome], path: Path = RECORD) -> None:
    """Write a line per architecture, by name."""
    lines = [json.dumps(outcomes[name].as_line()) for name in sorted(outcomes)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
