"""What requests get for the fields that they leave open, by the server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.v1 import inference_pb2 as wire

# Of a search only one of these may be true.
ENDINGS = ("early_stopping", "exhaustive_search")
# What a search takes of the sampling parameters.
IN_SEARCH = ("no_repeat_ngram_size",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Values for fields that a request leaves open, by names of the wire.

    Attributes:
        search: fields of a beam search; without num_beams, for requests that ask for one.
        sampling: fields of ``Sampling``.
        min_tokens: less where max_tokens is.
        max_tokens: None where the server's own default stands.
        bad_words: token sequences.
    """

    search: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def fill(self, request: wire.GenerateRequest) -> str:
        """Set the fields that a request leaves open; return what refusals call its beam search, empty without one."""
        is_asked = request.HasField("num_beams")
        num_beams = request.num_beams if is_asked else self.search.get("num_beams", 1)
        has_search = num_beams != 1
        if has_search:
            has_ending = any(request.HasField(name) for name in ENDINGS)
            for name, value in self.search.items():
                if not request.HasField(name) and not (has_ending and name in ENDINGS):
                    setattr(request, name, value)
        for name, value in self.sampling.items():
            is_taken = name in IN_SEARCH or not has_search
            if is_taken and not request.sampling.HasField(name):
                setattr(request.sampling, name, value)
        if not has_search:
            return ""
        return "num_beams" if is_asked else "num_beams (the server's default: say num_beams 1)"


NO_DEFAULTS = RequestDefaults()
