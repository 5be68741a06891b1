"""Prints the pins with hashes of what a report of ``pip install --dry-run --report`` would install; for the image.

    python hashed.py report.json requirements.txt > needed.txt

pip asks hashes of everything or of nothing, and knows the extras of a wheel that has none.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

OWN = ("outrider", "outrider-server")


def main(report: Path, requirements: Path) -> None:
    """Print the pins; exit where one is missing."""
    blocks = re.split(r"\n(?=[A-Za-z0-9._-]+==)", requirements.read_text(encoding="utf-8"))
    pins = {_plain(block.partition("==")[0]): block.rstrip("\n") for block in blocks}
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    names = {_plain(one["metadata"]["name"]) for one in found} - {*OWN}
    if missing := sorted(names - pins.keys()):
        raise SystemExit(f"requirements.txt has no pin of {', '.join(missing)}")
    print("\n".join(pins[name] for name in sorted(names)))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
