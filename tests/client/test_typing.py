"""mypy knows the options by name and type, and the code of docs/python.md passes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
MISTAKES = """
from outrider import LLM, Client, SamplingParams, SyncClient

client = Client("localhost:1")
client.generate("a", temprature=1.0)
client.generate("a", max_tokens="3")
SyncClient("localhost:1").complete("a", speculation={"gama": 4})
SamplingParams(temprature=1.0)
LLM("bundle").generate("a", {"top_q": 1})
client.generate("a", metadata={"key": "value"}, stop="x", json_schema={"type": "object"})
"""
# Line of the mistake, and what mypy says of it.
SAID = {
    5: '"temprature"',
    6: '"max_tokens"',
    7: '"gama"',
    8: '"temprature"',
    9: '"dict[str, int]"',
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "build" / "stage").exists(), reason="scripts/stage makes the folder that mypy reads"
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each file: the mistakes, and the blocks of the page."""
    folder = tmp_path_factory.mktemp("typed")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    texts = {"mistakes": MISTAKES} | {f"block_{i}": text for i, text in enumerate(blocks)}
    files = {name: folder / f"{name}.py" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name], encoding="utf-8")
    # With the settings and the cache of the project, which its own check has filled.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, files.values())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [one for one in lines if f"{name}.py:" in one] for name in texts}


def test_mypy_catches_options_that_do_not_exist_or_have_another_type(said: dict[str, list[str]]):
    errors = [line for line in said["mistakes"] if " error: " in line]
    assert [int(re.findall(r"\.py:(\d+):", line)[0]) for line in errors] == list(SAID)
    for line, words in zip(errors, SAID.values(), strict=True):
        assert words in line


def test_the_code_of_the_page_passes_mypy(said: dict[str, list[str]]):
    blocks = {name: lines for name, lines in said.items() if name != "mistakes"}
    assert len(blocks) >= 5
    assert not any(blocks.values()), blocks
