"""The tokens of a pair: one vocabulary or maps between two, and what a bundle gets to make texts tokens."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import EncoderDecoder
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.export.chat import write_chat, write_generation_defaults
from outrider.export.checkpoint import Checkpoint
from outrider.export.tokenizers.text2text import read_tokenizers, write_tokenizers
from outrider.export.tokenizers.twins import TokenMaps, token_maps
from tokenizers import Tokenizer


def check_tokens(checkpoints: Mapping[str, Checkpoint]) -> TokenMaps | None:
    """Return the maps between the target's tokens and those of a draft that has others; None where they are the same.

    Args:
        checkpoints: of the target and, behind it, of the draft if there is one.

    Raises:
        BundleError: a tokenizer is missing, or has ids beyond its model's vocabulary; or tokenizers differ that no maps
            are made for: names the first id that differs.
    """
    (answers, sources), *of_draft = (_tokenizers(one) for one in checkpoints.values())
    for draft_answers, draft_sources in of_draft:
        target, draft = checkpoints.values()
        differs = _difference(answers, draft_answers)
        if sources is not None and draft_sources is not None:
            differs = differs or _difference(sources, draft_sources)
        if differs and (sources is not None or draft.model_config.parallel_token is not None):
            raise BundleError(differs)
        if differs:
            return token_maps((answers, target.model_config), (draft_answers, draft.model_config))
    return None


def prompt_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return what makes prompts of a checkpoint tokens: where it has an encoder, the tokenizer of sources."""
    answers, sources = _tokenizers(checkpoint)
    return answers if sources is None else sources


def _tokenizers(checkpoint: Checkpoint) -> tuple[Tokenizer, Tokenizer | None]:
    """Return a checkpoint's tokenizers of answers and, where it has an encoder, of sources."""
    if checkpoint.model_config.source is None:
        return _checked_tokenizer(checkpoint), None
    return read_tokenizers(checkpoint.path, checkpoint.config).tokenizers()


def write_texts(target: Checkpoint, root: Path) -> EncoderDecoder | None:
    """Write the target's tokenizers to a bundle's folder; return how its texts become tokens, if it has an encoder.

    Without one, its chat templates and generation defaults are written too, where it has some.

    Raises:
        BundleError: a tokenizer cannot be converted, nothing says what an answer begins with, or a chat template is
            none.
    """
    if target.model_config.source is not None:
        return write_tokenizers(target.path, target.config, root)
    shutil.copyfile(target.path / TOKENIZER_FILE, root / TOKENIZER_FILE)
    write_chat(target.path, root)
    write_generation_defaults(target.path, root)
    return None


def _checked_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the checkpoint's tokenizer, all of whose ids have a logit.

    Raises:
        BundleError: no tokenizer.json, one that cannot be read, or an id beyond the model's vocabulary.
    """
    path = checkpoint.path / TOKENIZER_FILE
    if not path.is_file():
        raise BundleError(f"{checkpoint.path.name}: {TOKENIZER_FILE} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises bare Exception for a file it cannot read.
    except Exception as error:
        raise BundleError(f"{checkpoint.path.name}: {TOKENIZER_FILE} is not a tokenizer") from error
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if index >= checkpoint.model_config.vocab_size:
            raise BundleError(
                f"{checkpoint.path.name}: token {token!r} has id {index}, but the model's "
                f"vocabulary ends at {checkpoint.model_config.vocab_size - 1}"
            )
    return tokenizer


def _difference(target: Tokenizer, draft: Tokenizer) -> str:
    """Return how a draft's ids stand for other tokens than the target's, by the first that does; empty if none do."""
    target_tokens = {index: token for token, index in target.get_vocab().items()}
    draft_tokens = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(target_tokens.keys() | draft_tokens.keys()):
        ours, theirs = target_tokens.get(index), draft_tokens.get(index)
        if ours != theirs:
            return (
                f"target and draft have different vocabularies: id {index} is {ours!r} in the "
                f"target and {theirs!r} in the draft; use a draft of the target's family"
            )
    return ""
