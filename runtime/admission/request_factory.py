"""The worker's requests, made of what callers ask for; refused is what no step could ever serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engines.base import EngineLimits
from outrider.runtime.core.errors import ContextTooLong, RequestError, UnsupportedOption
from outrider.runtime.core.params import GrammarParams, RequestSpec
from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.core.text import Decoder
from outrider.runtime.grammar.base import Constraint, Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    """Makes requests for one target.

    Attributes:
        limits: of the target.
        num_slots: that there are for requests.
        max_forced: tokens that a constraint may force behind a judged one.
        decoder: turns tokens into text.
        resolve: returns how a request is drafted for; called once for each that fits.
        constraints: makes the constraints of answers; None where none are served.
    """

    limits: EngineLimits
    num_slots: int
    max_forced: int
    decoder: Decoder
    resolve: Callable[[RequestSpec], Speculation]
    constraints: Constraints | None = None

    def make(self, spec: RequestSpec, now: float, first: Request | None = None) -> Request:
        """Return a request with its speculation resolved, submitted ``now``.

        ``first`` is of the same group, whose tokens are copied.

        Raises:
            ContextTooLong: the prompt leaves no room for a token, or the source is too long.
            RequestError: more slots are needed than there are, the constraint cannot be had, or a source is missing or
                read by nobody.
        """
        max_context = self.limits.max_context
        self._check_source(spec)
        needed = len(spec.prompt_tokens) + 1
        if needed > max_context:
            rule = "must leave room for one token"
            field = "answer_prefix" if spec.source_tokens else "prompt"
            raise ContextTooLong(field, rule, limit=max_context, given=needed)
        speculation = self.resolve(spec)
        if spec.num_slots > self.num_slots:
            rule = f"must be at most {self.num_slots}, the slots of this server"
            raise RequestError("num_beams", rule)
        return Request(
            spec,
            speculation=speculation,
            max_context=max_context,
            decoder=self.decoder,
            submitted_at=now,
            constraint=None if spec.grammar is None else self._constraint(spec.grammar),
            max_forced=self.max_forced,
            first=first,
        )

    def _constraint(self, params: GrammarParams) -> Constraint:
        if self.constraints is None:
            raise UnsupportedOption(params.kind, "is not supported by this server; leave it out")
        return self.constraints.constraint(params)

    def _check_source(self, spec: RequestSpec) -> None:
        """Refuse a source where none is read, none where one is, and one that is too long."""
        longest, length = self.limits.max_source, len(spec.source_tokens)
        if bool(longest) != bool(length):
            rule = "must be a source" if longest else "must not be a source: there is no encoder"
            raise RequestError("prompt", rule)
        if length > longest:
            rule = f"must be at most {longest} tokens"
            raise ContextTooLong("prompt", rule, limit=longest, given=length)
