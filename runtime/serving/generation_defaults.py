"""What requests get for the fields that they leave open, where the server applies a checkpoint's generation defaults.

The names are those of Transformers' ``GenerationConfig`` in the bundle, and the wire's in ``RequestDefaults``. Each
value must keep the rules of a request; what no request could ask for is left out and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.engines.sampling.base import SamplingParams
from outrider.runtime.core.checks.fields import GenerateFields
from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.options import check_count, check_ids, check_range
from outrider.runtime.core.checks.validate import check_fields
from outrider.runtime.core.errors import RequestError
from outrider.runtime.core.params import BeamParams

# Of a search only one of these may be true.
_ENDINGS = ("early_stopping", "exhaustive_search")
# Applied where do_sample is true; Transformers reads none of them otherwise.
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_SAMPLING = (*_DRAWING, "repetition_penalty", "no_repeat_ngram_size")
# Those of them that a beam search takes.
_IN_SEARCH = ("no_repeat_ngram_size",)
_COUNTS = ("top_k", "no_repeat_ngram_size", "num_beams")
_LEAST_LENGTHS = ("min_length", "min_new_tokens")
# The one that wins stands last.
_MOST_LENGTHS = ("max_length", "max_new_tokens")
# Where they ask for nothing, beside false, 0 and what is empty.
_NEUTRAL = {"num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values for fields that a request leaves open, by names of the wire.

    Attributes:
        search: fields of a beam search; without num_beams, for requests that ask for one.
        sampling: fields of ``Sampling``.
        min_tokens: as ``GenerateFields.default_min_tokens``.
        max_tokens: None where the server's own default stands.
        bad_words: token sequences.
    """

    search: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def search_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given fields of a request, and of a search those that it leaves open."""
        if given.get("num_beams", self.search.get("num_beams", 1)) == 1:
            return {**given}
        has_ending = any(name in given for name in _ENDINGS)
        left = {k: v for k, v in self.search.items() if not (has_ending and k in _ENDINGS)}
        return {**left, **given}

    def sampling_of(self, given: Mapping[str, Any], *, has_beams: bool) -> dict[str, Any]:
        """Return the given fields of ``Sampling``, and those that are left open."""
        left = {k: v for k, v in self.sampling.items() if not has_beams or k in _IN_SEARCH}
        return {**left, **given}


NO_DEFAULTS = RequestDefaults()


def request_defaults(
    asked: Mapping[str, object], *, num_prefix: int, limits: RequestLimits, model: ServedModel
) -> tuple[RequestDefaults, str]:
    """Return what a checkpoint's generation defaults give requests, and a line that says so.

    Args:
        asked: names and values as of Transformers' ``GenerationConfig``.
        num_prefix: tokens of the model's decoder prefix; Transformers counts them as output, and all but the first
            one as new. Without an encoder 1: there it counts the prompt too, and what counts it is left out.
        limits: of a request.
        model: that requests are checked against.
    """
    reader = _Reader(limits, model)
    draws = asked.get("do_sample") is True
    for name in sorted(asked.keys() - {"do_sample"}):
        if name in _DRAWING and not draws:
            continue
        try:
            reader.take(name, asked[name], num_prefix)
        except RequestError as error:
            known = name if name.isidentifier() else repr(name)
            reader.left_out.append(f"{known} ({error.rule})")
    if draws and reader.search.pop("num_beams", None):
        reader.left_out.append("num_beams (a beam search draws nothing, and do_sample is true)")
    if not draws:
        reader.sampling["temperature"] = 0.0
    return reader.defaults(), reader.line()


class _Reader:
    """Takes one default after the other.

    Attributes:
        search: as of ``RequestDefaults``.
        sampling: likewise.
        left_out: what no request can have, with the reason.
    """

    def __init__(self, limits: RequestLimits, model: ServedModel) -> None:
        self._limits = limits
        self._model = model
        self.search: dict[str, Any] = {}
        self.sampling: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._lengths: dict[str, int] = {}
        self._bad_words: tuple[tuple[int, ...], ...] = ()

    def take(self, name: str, value: object, num_prefix: int) -> None:
        """Take a default.

        Raises:
            RequestError: no request can have it.
        """
        if name in _SAMPLING:
            given: dict[str, Any] = {name: _number(name, value)}
            self._check(params=SamplingParams(**given))
            self.sampling |= given
        elif name == "early_stopping":
            self._take_ending(value)
        elif name in ("num_beams", "length_penalty"):
            beams: dict[str, Any] = {"num_beams": 1, name: _number(name, value)}
            self._check(params=SamplingParams(temperature=0.0), beams=BeamParams(**beams))
            self.search[name] = beams[name]
        elif name in (*_LEAST_LENGTHS, *_MOST_LENGTHS):
            if "new" not in name and not self._model.max_source:
                raise RequestError(name, "counts the prompt's tokens too")
            length = _count(name, value) - (num_prefix - 1 if "new" in name else num_prefix)
            if name in _MOST_LENGTHS:
                check_range(name, length, 1, length, "must leave a token behind the decoder prefix")
            self._lengths[name] = min(length, self._limits.max_tokens)
        elif name == "bad_words_ids":
            self._bad_words = _sequences(value, self._limits, self._model)
        elif value and value != _NEUTRAL.get(name):
            raise RequestError(name, "is not supported by this server")

    def _take_ending(self, value: object) -> None:
        if value not in (True, False, "never"):
            raise RequestError("early_stopping", 'must be true, false or "never"')
        if value:
            self.search["exhaustive_search" if value == "never" else "early_stopping"] = True

    def _check(self, **fields: Any) -> None:
        check_fields(GenerateFields(tokens=(0,), **fields), self._limits, self._model)

    def defaults(self) -> RequestDefaults:
        """Return what was taken."""
        least = [self._lengths[name] for name in _LEAST_LENGTHS if name in self._lengths]
        most = [self._lengths[name] for name in _MOST_LENGTHS if name in self._lengths]
        return RequestDefaults(
            search=self.search,
            sampling=self.sampling,
            min_tokens=max([0, *least]),
            max_tokens=most[-1] if most else None,
            bad_words=self._bad_words,
        )

    def line(self) -> str:
        """Return what was taken and what was left out, for the log."""
        defaults = self.defaults()
        values = {**defaults.search, **defaults.sampling}
        values |= {"min_tokens": defaults.min_tokens} if defaults.min_tokens else {}
        values |= {} if defaults.max_tokens is None else {"max_tokens": defaults.max_tokens}
        values |= {"bad_words": len(defaults.bad_words)} if defaults.bad_words else {}
        line = "the checkpoint has no defaults for requests"
        if values:
            taken = ", ".join(f"{name} {value}" for name, value in values.items())
            line = f"defaults of requests are the checkpoint's: {taken}"
        left_out = [*self.left_out]
        if "num_beams" in defaults.search:
            # The temperature of a search is 0 anyway.
            only_drawn = [k for k in self.sampling if k not in (*_IN_SEARCH, "temperature")]
            left_out += [f"{name} (only to requests without num_beams)" for name in only_drawn]
        return f"{line}; not applied: {', '.join(left_out)}" if left_out else line


def _number(name: str, value: object) -> float:
    if name in _COUNTS:
        return _count(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(name, "must be a number")
    try:
        return float(value)
    except OverflowError:  # of a whole number of hundreds of digits
        raise RequestError(name, "must be a number of 64 bits") from None


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, "must be a whole number")
    return value


def _sequences(
    value: object, limits: RequestLimits, model: ServedModel
) -> tuple[tuple[int, ...], ...]:
    """Return token sequences that are not banned anyway."""
    name = "bad_words_ids"
    words: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(word, list) and word for word in words):
        raise RequestError(name, "must be a list of lists of token ids")
    sequences = tuple(tuple(_count(name, token) for token in word) for word in words)
    for sequence in sequences:
        check_ids(name, sequence, model.vocab_size)
    check_count(name, sequences, limits.max_bad_words)
    return tuple(one for one in sequences if len(one) > 1 or one[0] not in model.banned_token_ids)
