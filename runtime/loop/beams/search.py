"""One request that is answered by a beam search: its state between two steps, and its answer.

The counterpart of ``runtime.core.request`` for several hypotheses; the request itself keeps identity, life and figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider.engines.base import Engine, EngineError, FloatArray
from outrider.engines.sampling.base import Continuations
from outrider.engines.sampling.continuations import continuations_of
from outrider.runtime.core.events import BeamAnswer, Finished, FinishReason
from outrider.runtime.core.lifecycle import RequestEvent, State
from outrider.runtime.core.params import BeamParams
from outrider.runtime.core.request import Request
from outrider.runtime.core.text import Decoder, IncrementalDecoder
from outrider.runtime.loop.beams.beam import BeamRules, BeamState, Hypothesis
from outrider.runtime.loop.beams.cache import BeamCache


class BeamSearch:
    """A request that holds one slot per beam, in the target.

    Args:
        request: admitted by this; its ``slot`` is the first of the search.
        engine: the target.
        slots: as many as the request needs.
        order: admission number.

    Attributes:
        state: the search's.
        cache: what the slots hold.
    """

    def __init__(self, request: Request, engine: Engine, slots: Sequence[int], order: int) -> None:
        spec = request.spec
        assert spec.beams is not None
        self.request = request
        self.params: BeamParams = spec.beams
        self.slots = list(slots)
        self.state = BeamState()
        self.rules = BeamRules(
            num_beams=self.params.num_beams,
            max_tokens=request.sequence.max_output,
            end_tokens=frozenset(spec.params.end_token_ids),
            length_penalty=self.params.length_penalty,
            stops_early=self.params.stops_early,
            is_exhaustive=self.params.is_exhaustive,
            num_forced=self.params.num_forced,
        )
        self.cache = BeamCache(engine, spec.prompt_tokens, self.slots)
        request.admit(slot=self.slots[0], order=order)

    @property
    def is_searching(self) -> bool:
        """Return whether the prompt is computed and the answer not yet found."""
        return self.request.state is State.DECODING

    def move(self, source: int, destination: int) -> bool:
        """Move the row in slot ``source``, one of the search's, to another slot.

        Returns:
            Whether it could be; where not, the request cannot go on.
        """
        member = self.slots.index(source)
        try:
            self.cache.move(member, destination)
        except EngineError:
            return False
        finally:
            self.slots[member] = destination
            self.request.slot = self.slots[0]
        return True

    def continuations(self, logits: FloatArray, tail: tuple[int, ...]) -> Continuations | None:
        """Return the likeliest tokens that may follow the prompt and ``tail``; None where the row is not finite.

        Args:
            logits: [V] float32 behind them.
            tail: tokens of a hypothesis.
        """
        request = self.request
        history = request.sequence.history
        if request.spec.params.has_processors:
            history = np.concatenate([history, np.array(tail, dtype=np.int64)])
        return continuations_of(
            logits, self.rules.row_size, request.spec.params, history, request.sequence.num_prompt
        )

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
