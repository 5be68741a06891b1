"""One request that is answered by a beam search: its state between two steps, and its answer.

The counterpart of ``runtime.core.request`` for several hypotheses; the request itself keeps identity, life and figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import Engine, EngineError, EngineLimits, FloatArray
from outrider.engines.sampling.base import Continuations
from outrider.engines.sampling.continuations import continuations_of
from outrider.runtime.core.events import BeamAnswer, Finished, FinishReason
from outrider.runtime.core.lifecycle import RequestEvent, State
from outrider.runtime.core.params import BeamParams, RequestSpec
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder, IncrementalDecoder
from outrider.runtime.loop.beams.beam import BeamDraft, BeamRules, BeamState, Hypothesis
from outrider.runtime.loop.beams.cache import BeamCache


class BeamSearch:
    """A request that holds one slot per beam, in the target and in the draft.

    Args:
        request: admitted by this; its ``slot`` is the first of the search.
        engines: the target and, where there is one, the draft.
        slots: as many as the request needs.
        order: admission number.

    Attributes:
        state: the search's.
        caches: what the slots hold, per engine.
    """

    def __init__(
        self, request: Request, engines: Sequence[Engine], slots: Sequence[int], order: int
    ) -> None:
        spec = request.spec
        assert spec.beams is not None
        self.request = request
        self.params: BeamParams = spec.beams
        self.slots = list(slots)
        self.state = BeamState()
        self.rules = BeamRules(
            num_beams=self.params.num_beams,
            max_tokens=request.max_output,
            end_tokens=frozenset(spec.params.end_token_ids),
            length_penalty=self.params.length_penalty,
            stops_early=self.params.stops_early,
            is_exhaustive=self.params.is_exhaustive,
            num_forced=self.params.num_forced,
        )
        self.caches = [BeamCache(engine, spec.prompt_tokens, self.slots) for engine in engines]
        self._fits_draft = len(engines) > 1 and _fits(spec, engines[1].limits)
        request.admit(slot=self.slots[0], order=order)

    @property
    def is_searching(self) -> bool:
        """Return whether the prompt is computed and the answer not yet found."""
        return self.request.state is State.DECODING

    @property
    def can_draft(self) -> bool:
        """Return whether the draft model is wanted, and can read the prompt."""
        return self.request.gamma > 0 and self._fits_draft

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and of a live hypothesis."""
        return self.request.num_prompt + len(self.state.live[0].tokens)

    def lengths(self, member: int) -> list[int]:
        """Per engine the tokens that a member's slot holds."""
        return [cache.lengths[member] for cache in self.caches]

    def move(self, source: int, destination: int) -> bool:
        """Move the row in slot ``source``, one of the search's, to another slot.

        Returns:
            Whether it could be; where not, the request cannot go on.
        """
        member = self.slots.index(source)
        try:
            for cache in self.caches:
                cache.move(member, destination)
        except EngineError:
            return False
        finally:
            self.slots[member] = destination
            self.request.slot = self.slots[0]
        return True

    def draft(self, max_gamma: int) -> BeamDraft:
        """A draft to grow, of as many steps as are wanted and the draft model has room for."""
        gamma = min(self.request.gamma, max_gamma) if self.can_draft else 0
        if gamma:
            limits = self.caches[1].engine.limits
            # The last step drafted is never fed.
            gamma = max(0, min(gamma, limits.max_context + 1 - self.num_known))
            if any(max(one.tokens, default=0) >= limits.vocab_size for one in self.state.live):
                gamma = 0
        return BeamDraft(self.state, self.rules, width=len(self.slots), gamma=gamma)

    @property
    def draft_row_size(self) -> int:
        """Return ``rules.row_size`` for a search as wide as the draft."""
        return len(self.slots) + len(self.rules.end_tokens)

    def continuations(
        self, logits: FloatArray, tail: tuple[int, ...], count: int
    ) -> Continuations | None:
        """Return the tokens that may follow the prompt and ``tail``; None where the row is not finite.

        Args:
            logits: [V] float32 behind them, of either model.
            tail: tokens of a hypothesis.
            count: how many, at most.
        """
        request = self.request
        history = request.history
        if request.spec.params.has_processors:
            history = np.concatenate([history, np.array(tail, dtype=np.int64)])
        return continuations_of(logits, count, request.spec.params, history, request.num_prompt)

    def finished(self, decoder: Decoder) -> Finished:
        """The answer of a search that is over and found something."""
        self.request.transition(RequestEvent.STOPPED)
        found = self.state.finished[: self.params.num_results]
        answers = tuple(self._answer(one, decoder) for one in found)
        best = answers[0]
        return Finished(
            reason=best.reason,
            stop=best.stop,
            text=best.text,
            num_prompt=self.request.spec.num_prompt_tokens,
            num_output=sum(len(answer.tokens) for answer in answers),
            report=self.request.report(),
            beams=answers,
        )

    def _answer(self, found: Hypothesis, decoder: Decoder) -> BeamAnswer:
        spec, tokens = self.request.spec, found.tokens
        is_stopped = tokens[-1] in self.rules.end_tokens
        text = IncrementalDecoder(
            decoder, spec.prompt_tokens, skip_special_tokens=spec.skip_special_tokens
        )
        shown = tokens[:-1] if is_stopped and not spec.include_stop else tokens
        pieces = [text.push(token) for token in shown]
        return BeamAnswer(
            tokens=tokens,
            text="".join((*pieces, text.flush())),
            log_prob=found.log_prob,
            score=self.rules.score(found.log_prob, len(tokens)),
            reason=FinishReason.STOP_TOKEN if is_stopped else FinishReason.LENGTH,
            stop=tokens[-1] if is_stopped else None,
        )


def _fits(spec: RequestSpec, limits: EngineLimits) -> bool:
    """Return whether a draft model of these limits can read a request's source and prompt."""
    fits = (
        len(spec.source_tokens) <= limits.max_source
        and len(spec.prompt_tokens) <= limits.max_context
    )
    return fits and max(spec.prompt_tokens) < limits.vocab_size
