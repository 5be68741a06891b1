"""Calibration by a text of one's own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.export.weights.given_text import given_text, read_rows
from outrider.export.weights.written_text import NUM_ROWS, NUM_TOKENS
from tokenizers import Tokenizer

from tests.conftest import CORPUS
from tests.export.conftest import Exported


@pytest.fixture
def tokenizer(tiny_checkpoints: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoints[0] / "tokenizer.json"))


def test_rows_are_spread_over_the_text_from_its_first_token_to_its_last(
    tokenizer: Tokenizer, tmp_path: Path
):
    text = "\n".join(f"{number} {CORPUS[number % 3]}" for number in range(400))
    (tmp_path / "text").write_text(text)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) > 2 * NUM_ROWS * NUM_TOKENS
    rows = read_rows(tmp_path / "text", tokenizer)
    assert rows.shape == (NUM_ROWS, NUM_TOKENS)
    assert rows[0].tolist() == tokens[:NUM_TOKENS]
    assert rows[-1].tolist() == tokens[-NUM_TOKENS:]
    middle = (len(tokens) - NUM_TOKENS) * 5 // (NUM_ROWS - 1)
    assert rows[5].tolist() == tokens[middle : middle + NUM_TOKENS]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"too short", "has .* tokens, at least 2048 are wanted"),
        (b"\xff\xfe", "must be UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_text_that_is_none_is_refused_by_name(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes | None, words: str
):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BundleError, match=f"^calibration_text text.txt: {words}"):
        read_rows(file, tokenizer)


def test_integers_are_rounded_by_the_text_and_other_weights_refuse_it(
    export_small: Callable[..., Bundle], tmp_path: Path
):
    text = tmp_path / "text.txt"
    text.write_text(CORPUS[0] * 500)
    quick = {"max_tree_nodes": 0, "weights": "int4"}
    written = export_small(out=tmp_path / "written", **quick)
    given = export_small(out=tmp_path / "given", calibration_text=text, **quick)
    data = "target/model.onnx.data"
    assert given.manifest.files[data].size == written.manifest.files[data].size
    assert given.manifest.files[data].sha256 != written.manifest.files[data].sha256
    with pytest.raises(BundleError, match="calibration_text: only weights int8, int4, w8a8"):
        export_small(out=tmp_path / "none", calibration_text=text, progress=pytest.fail)


@pytest.mark.parametrize("text2text", ["t5"], indirect=True)
def test_a_model_with_an_encoder_answers_the_text(text2text: Exported):
    rows = np.arange(NUM_ROWS * NUM_TOKENS).reshape(NUM_ROWS, NUM_TOKENS) % 90
    text = given_text(text2text.path, text2text.model_config, rows)
    assert text.sources is not None
    assert text.sources.tokens.tolist() == rows.tolist()
    assert text.tokens.shape == rows.shape
