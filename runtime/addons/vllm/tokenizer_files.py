"""The files of a tokenizer as Transformers names them, in one archive: for who renders and tokenises himself."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import Any, NamedTuple

from outrider.runtime.core.errors import UnsupportedOption
from outrider.runtime.serving.chat.encoder import DEFAULT_TEMPLATE
from outrider.runtime.serving.loaded_model import LoadedModel
from outrider.runtime.serving.tokenizer import EncoderDecoderCodec, TokenizersCodec

# The oldest that an archive can say: equal bundles have equal archives.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


class Archive(NamedTuple):
    """Files in one."""

    data: bytes
    sha256: str


def tokenizer_archive(serving: LoadedModel) -> Archive:
    """Return a zip archive of ``tokenizer.json`` and ``tokenizer_config.json``; takes seconds where it is large.

    Raises:
        UnsupportedOption: the model has an encoder, so that no one tokenizer speaks for it.
    """
    codec = serving.codec
    if not isinstance(codec, TokenizersCodec) or isinstance(codec, EncoderDecoderCodec):
        raise UnsupportedOption("tokenizer", "needs a model without an encoder")
    config = json.dumps(_config(serving, codec), ensure_ascii=False)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, contents in (
            ("tokenizer.json", codec.source),
            ("tokenizer_config.json", config.encode()),
        ):
            archive.writestr(zipfile.ZipInfo(name, _NO_TIME), contents)
    packed = data.getvalue()
    return Archive(packed, hashlib.sha256(packed).hexdigest())


def _config(serving: LoadedModel, codec: TokenizersCodec) -> dict[str, Any]:
    model, chats = serving.model, serving.chats
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_context,
    }
    if model.eos_token_ids:
        config["eos_token"] = codec.spell(model.eos_token_ids[0])
    if chats is not None:
        templates = chats.files.templates
        config |= chats.files.special_tokens
        first = templates.get(DEFAULT_TEMPLATE)
        config["chat_template"] = first or next(iter(templates.values()))
    return config
