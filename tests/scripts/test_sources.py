"""Sources of benchmarks: whole, distinct, of the length asked for."""

import ast
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scripts.lab.bench.peers import prompts_of, reads_source
from scripts.tools.sources import (
    SUMMARIZE,
    TRANSLATE,
    functions,
    messages,
    sources_of_length,
    task_sources,
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A token a byte, and an end token behind every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, **{letter: at for at, letter in enumerate(alphabet, 1)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])  # fmt: skip
    return made


def test_messages_are_english_sentences_each_once() -> None:
    found = list(messages())
    assert len(found) > 100
    assert len(set(found)) == len(found)
    assert "I/O operation on closed file." in found


def test_functions_have_no_docstrings() -> None:
    found = list(functions())
    assert len(found) > 50
    for text in found:
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function) is None


def test_sources_begin_with_their_task() -> None:
    for task, prefix in (("translate", TRANSLATE), ("summarize", SUMMARIZE)):
        found = task_sources(task, 3)
        assert len(set(found)) == 3
        assert all(text.startswith(prefix) for text in found)


def test_sources_of_a_length_have_it_and_end_as_the_tokenizer_ends_them(
    tokenizer: Tokenizer,
) -> None:
    found = sources_of_length(tokenizer, 5, 60)
    assert {len(source) for source in found} == {60}
    assert len({tuple(source) for source in found}) == 5
    assert all(source[-1] == 0 and 0 not in source[:-1] for source in found)
    with pytest.raises(ValueError, match=r"only .* sources of 60 tokens"):
        sources_of_length(tokenizer, 10_000, 60)


def test_a_model_with_an_encoder_is_asked_to_translate(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    assert reads_source(tmp_path)
    assert prompts_of(tmp_path, 2, 60) == sources_of_length(tokenizer, 2, 60)
    (tmp_path / "config.json").write_text("{}")
    assert not reads_source(tmp_path)
    assert prompts_of(tmp_path, 2, 60) != sources_of_length(tokenizer, 2, 60)
