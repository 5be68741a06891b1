"""What requests get for the fields that they leave open, where the server applies a checkpoint's generation defaults.

The names are those of Transformers' ``GenerationConfig`` in the bundle, and the wire's in ``RequestDefaults``. Each
value must keep the rules of a request; what no request could ask for is left out and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.runtime.core.checks.limits import RequestLimits, ServedModel
from outrider.runtime.core.checks.rules import check_count, check_ids, check_range
from outrider.runtime.core.errors import RequestError
from outrider.runtime.serving.requests.bounds import RequestRules
from outrider.runtime.serving.requests.defaults import IN_SEARCH, RequestDefaults
from outrider.runtime.serving.requests.fields import FIELDS

# Applied where do_sample is true; Transformers reads none of them otherwise.
_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_SAMPLING = (*_DRAWING, "repetition_penalty", "no_repeat_ngram_size")
_COUNTS = ("top_k", "no_repeat_ngram_size", "num_beams")
_LEAST_LENGTHS = ("min_length", "min_new_tokens")
# The one that wins stands last.
_MOST_LENGTHS = ("max_length", "max_new_tokens")
# Where they ask for nothing, beside false, 0 and what is empty.
_NEUTRAL = {"num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1.0}


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
            number = _number(name, value)
            self._check(f"sampling.{name}", number)
            self.sampling[name] = number
        elif name == "early_stopping":
            self._take_ending(value)
        elif name in ("num_beams", "length_penalty"):
            number = _number(name, value)
            self._check(name, number)
            self.search[name] = number
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

    def _check(self, path: str, number: float) -> None:
        if (bound := FIELDS[path].bound) is not None:
            bound.check(path, number, RequestRules(self._limits, self._model))

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
            only_drawn = [k for k in self.sampling if k not in (*IN_SEARCH, "temperature")]
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
