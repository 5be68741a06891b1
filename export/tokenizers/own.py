"""A checkpoint's tokenizer as Transformers opens it, and what it puts around texts.

Nothing here knows architectures: what a tokenizer does is found out by giving it texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engines.base import BundleError
from outrider.engines.bundle.encoder_decoder import LANGUAGE, TEXT, Template, TemplateToken
from outrider.engines.bundle.names import TOKENIZER_FILE
from outrider.export.tokenizers.pieces import Vocabulary, piece_names, read_model
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class Side:
    """What reads texts of one side, sources or answers, by a SentencePiece model.

    Attributes:
        model: its description, see ``pieces.read_model``.
        vocabulary: the checkpoint's ids.
        processor: SentencePiece's, of that model.
    """

    model: Any
    vocabulary: Vocabulary
    processor: Any

    def is_odd(self, text: str) -> bool:
        """Return whether a text has what ``pieces`` reads in another way than the checkpoint's own tokenizer."""
        ids, tokens = self.vocabulary.piece_ids, set(self.vocabulary.tokens.values())
        for piece in self.processor.encode(text, out_type=str):
            if ids.get(piece) == self.vocabulary.unknown_id:
                return True
            if len(piece) > 1 and piece not in ids and not tokens.isdisjoint(piece):
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Languages:
    """The languages of a tokenizer.

    Attributes:
        ids: by code.
        source: code of the language that sources have where nobody names one; empty where that is not said.
        target: likewise of answers.
    """

    ids: Mapping[str, int]
    source: str = ""
    target: str = ""


class OwnTokenizer:
    """The tokenizer that Transformers opens in a checkpoint's folder.

    Raises:
        BundleError: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        file = path / TOKENIZER_FILE
        try:
            with warnings.catch_warnings():
                # Marian's recommends a package that it never uses.
                warnings.simplefilter("ignore")
                if file.is_file() and not (path / "tokenizer_config.json").is_file():
                    self._own: Any = PreTrainedTokenizerFast(tokenizer_file=str(file))
                else:
                    self._own = AutoTokenizer.from_pretrained(
                        path, local_files_only=True, trust_remote_code=False
                    )
        # A missing or broken file ends in whatever the class of the tokenizer raises.
        except Exception as error:
            raise BundleError(
                f"{path.name}: no tokenizer that Transformers opens: {error}"
            ) from error
        # It would join words and signs that were apart, which no stream can show in time.
        self._own.clean_up_tokenization_spaces = False
        self.languages = self._languages()

    @property
    def shares_vocabulary(self) -> bool:
        """Return whether sources and answers have the same ids for the same tokens."""
        return not getattr(self._own, "separate_vocabs", False)

    def chat_templates(self) -> dict[str, str]:
        """Return its chat templates by name, of which "default" is the one that has none; empty where it has none."""
        found: Any = self._own.chat_template
        return {"default": found} if isinstance(found, str) else dict(found or {})

    def special_tokens(self) -> dict[str, str]:
        """Return the tokens that chat templates know by name, such as "bos_token"."""
        return dict(self._own.special_tokens_map)

    def control_tokens(self) -> tuple[str, ...]:
        """Return the tokens that steer the model wherever they stand: special ones, and those it names as such."""
        named = getattr(self._own, "chat_control_tokens", None) or ()
        added = sorted(self._own.added_tokens_decoder.items())
        return tuple(one.content for _, one in added if one.special or one.content in named)

    def backend(self) -> str | None:
        """Return the contents of its ``tokenizer.json``; None for a tokenizer that Transformers runs in Python."""
        return str(self._own.backend_tokenizer.to_str()) if self._own.is_fast else None

    def sides(self) -> dict[str, Side]:
        """Return what it cuts by SentencePiece: "answers", and "sources" where they differ; empty where nothing is."""
        if hasattr(self._own, "spm_target"):
            return {
                "answers": self._side(self._own.spm_target, of_answers=True),
                "sources": self._side(self._own.spm_source, of_answers=False),
            }
        if hasattr(self._own, "sp_model"):
            return {"answers": self._side(self._own.sp_model, of_answers=False)}
        return {}

    def encode(self, texts: Sequence[str], *, of_answers: bool) -> list[list[int]]:
        """Return the ids of texts, without anything around them."""
        is_other = of_answers and hasattr(self._own, "spm_target")
        return [self._encode(text, around=False, is_answer=is_other) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's ids, without special tokens."""
        text: str = self._own.decode(list(ids), skip_special_tokens=True)
        return text

    def source_template(self) -> Template:
        """Return what it puts around sources.

        Raises:
            BundleError: it changes the text's own ids, or treats sources of its first two languages differently.
        """
        if not self.languages.ids:
            return self._template()
        before, found = self._own.src_lang, []
        compared = list(self.languages.ids)[:2]
        for code in compared:
            self._own.src_lang = code
            found.append(self._template(self.languages.ids[code]))
        if before is not None:
            self._own.src_lang = before
        if len(set(found)) > 1:
            raise BundleError(
                f"{self.name}: its tokenizer puts other tokens around sources of {compared[0]} than of {compared[1]}"
            )
        return found[0]

    def _template(self, language: int | None = None) -> Template:
        whole, text = self._encode(_PROBE, around=True), self._encode(_PROBE, around=False)
        for start in range(len(whole) - len(text) + 1 if text else 0):
            end = start + len(text)
            if whole[start:end] == text:
                around: list[TemplateToken] = [*whole[:start], TEXT, *whole[end:]]
                return tuple(LANGUAGE if one == language else one for one in around)
        raise BundleError(f"{self.name}: its tokenizer puts more than a frame around a text")

    def _encode(self, text: str, *, around: bool, is_answer: bool = False) -> list[int]:
        side = "text_target" if is_answer else "text"
        found = self._own(**{side: text}, add_special_tokens=around, verbose=False)
        return [int(one) for one in found["input_ids"]]

    def _switch(self, *, to_answers: bool) -> None:
        """Take the pieces of answers, of tokenizers that have pieces of their own for them."""
        if hasattr(self._own, "spm_target"):
            switch = "_switch_to_target_mode" if to_answers else "_switch_to_input_mode"
            getattr(self._own, switch)()

    def _languages(self) -> Languages:
        """Return the tokens that, named as the source's language, appear around a text."""
        own = self._own
        if not isinstance(getattr(type(own), "src_lang", None), property):
            return Languages(ids={})
        codes = getattr(own, "lang_code_to_id", None)
        if codes is None:
            extra = [str(token) for token in own.extra_special_tokens]
            codes = dict(zip(extra, own.convert_tokens_to_ids(extra), strict=True))
        others = {
            own.unk_token_id,
            *(getattr(own, f"{name}_id") for name in own.SPECIAL_TOKENS_ATTRIBUTES),
        }
        ids = {code: int(index) for code, index in codes.items() if index not in others}
        if not ids:
            raise BundleError(
                f"{self.name}: its tokenizer wants languages, but has no tokens for them"
            )
        # A language that its files do not name is its class's idea.
        source = own.src_lang if own.init_kwargs.get("src_lang") else ""
        return Languages(
            ids=ids,
            source=source if source in ids else "",
            target=own.tgt_lang if own.tgt_lang in ids else "",
        )

    def _side(self, processor: Any, *, of_answers: bool) -> Side:
        model = read_model(processor.serialized_model_proto())
        pieces = piece_names(model)
        self._switch(to_answers=of_answers)
        try:
            ids = self._own.convert_tokens_to_ids(list(pieces))
            vocabulary = Vocabulary(
                tokens={
                    index: token for token, index in self._vocab(of_answers=of_answers).items()
                },
                piece_ids=dict(zip(pieces, ids, strict=True)),
                unknown_id=int(self._own.unk_token_id),
                added=self._added(),
            )
        finally:
            self._switch(to_answers=False)
        return Side(model, vocabulary, processor)

    def _vocab(self, *, of_answers: bool) -> dict[str, int]:
        own = self._own
        found: dict[str, int] = (
            own.target_encoder if of_answers and not self.shares_vocabulary else own.get_vocab()
        )
        return found

    def _added(self) -> dict[int, AddedToken]:
        """Return the tokens that are found in any text: special ones, languages, and what users added."""
        own = self._own
        languages = own.convert_ids_to_tokens(list(self.languages.ids.values()))
        special = dict.fromkeys((*own.all_special_tokens, *languages))
        # In front of a text that is to become one of several languages.
        codes = dict.fromkeys(getattr(own, "supported_language_codes", ()))
        tokens = {
            index: AddedToken(token, special=token in special, normalized=False)
            for token in (*special, *codes)
            if (index := own.convert_tokens_to_ids(token)) is not None
        }
        return dict(own.added_tokens_decoder) | tokens
