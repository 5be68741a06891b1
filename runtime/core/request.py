"""One request from admission to its terminal event.

Invariants between steps, where n is ``sequence.num_known`` and the other counts are of ``cache`` and ``sequence``:

* R1  A decoding request has ``num_computed == n - 1 - num_pending``: the last judged token has no keys yet, nor have
  those that its constraint forced behind it, which are known without being judged. The first token of an answer may
  come out of the pass over the prompt's end: its commit takes the request from prefilling to decoding.
* R2  ``draft_computed <= n - 1 - num_pending``: the draft model is fed the last judged token, and what is forced behind
  it, before its next draft.
* R3  A request holds a slot exactly while it is reading, prefilling or decoding.
* R4  Of a request with a source, nothing is computed before the target has read it, and ``draft_computed`` is -1 until
  the draft model has.
* R5  A request with a leader has nothing computed. Once the leader's prompt is computed, it stands where that one does,
  and has no leader any more. A leader has none itself.

Only ``Request.commit`` changes tokens, text and figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.engines.base import IntArray
from outrider.engines.sampling.base import SamplingRow, TokenLogprobs, Verdict
from outrider.runtime.core.events import (
    EmittedToken,
    FinishReason,
    Progressed,
    PromptToken,
    Provenance,
    SpeculationDisabledReason,
    SpeculationReport,
    StepTrace,
    Times,
)
from outrider.runtime.core.lifecycle import LIFECYCLE, IllegalTransition, RequestEvent, State
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.sequence import TokenSequence
from outrider.runtime.core.stats import SpeculationStats
from outrider.runtime.core.text import CompletionText, Decoder, IncrementalDecoder, StopScanner
from outrider.runtime.grammar.base import MOST_FORCED, Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a completion ended well, with the stop that did it and the text still held back."""

    reason: FinishReason
    stop: str | int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a request is drafted for, with defaults and availability resolved.

    Attributes:
        drafter: registry name.
        gamma: draft tokens per step, at most.
        off_reason: why speculation is off or degraded; None when it is on as asked.
        is_adaptive: whether each step's draft tokens are chosen by what they are expected to gain.
        verifies_block: whether sampled drafts are judged as whole blocks.
        fixed_gamma: draft tokens per step while none can be chosen; None for ``gamma``.
        chosen: the drafter that was chosen in place of "auto"; empty where one was asked for.
        num_behind: point masses that its drafter may put behind these tokens, at most.
    """

    drafter: str
    gamma: int
    off_reason: SpeculationDisabledReason | None
    is_adaptive: bool = False
    verifies_block: bool = False
    fixed_gamma: int | None = None
    chosen: str = ""
    num_behind: int = 0


@dataclass(slots=True, kw_only=True)
class CacheState:
    """What the models' caches hold of a request.

    Attributes:
        num_computed: leading tokens valid in the target's cache.
        num_cached: of these, leading tokens of the prompt that were computed for an earlier request.
        chunk_end: where a chunk of the prompt ends, so that it can be kept up to there; 0 for anywhere.
        num_exact: leading tokens whose cache has the bits of chains; those behind side branches of trees may not.
        num_unread: tokens of a source that the target has yet to read.
        draft_computed: leading tokens valid in the draft's cache; -1 while the draft model has a source to read.
    """

    num_exact: int
    num_unread: int
    draft_computed: int
    num_computed: int = 0
    num_cached: int = 0
    chunk_end: int = 0


@dataclass(slots=True)
class Timestamps:
    """When the parts of a request's life began, in seconds on the worker's clock.

    Attributes:
        admitted_at: when it got its slot; None before.
        first_at: the end of the step that gave its first token; None before.
    """

    submitted_at: float
    admitted_at: float | None = None
    first_at: float | None = None

    def times(self, now: float) -> Times:
        """Return how long the parts of its life took, which ends ``now``."""
        if self.admitted_at is None:
            return Times(queued_s=now - self.submitted_at)
        first_at = now if self.first_at is None else self.first_at
        return Times(
            queued_s=self.admitted_at - self.submitted_at,
            prefill_s=first_at - self.admitted_at,
            decode_s=now - first_at,
        )


@dataclass(slots=True)
class GroupMembership:
    """A request's place among the completions of one prompt that were admitted together.

    Attributes:
        name: of the group; empty for a request alone.
        leader: the request that reads the prompt for this one, which waits; None where this one reads.
        followers: the requests that this one is the leader of.
    """

    name: str = ""
    leader: Request | None = None
    followers: Sequence[Request] = ()


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, collected while it is fed and reported once.

    Attributes:
        logprobs: of the tokens behind the first, as far as they were fed.
        is_reported: whether the caller has them.
    """

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_reported: bool = False

    def take(self, prompt_tokens: Sequence[int]) -> tuple[PromptToken, ...]:
        """Return the prompt with its log-probabilities; nothing once they were reported."""
        if self.is_reported:
            return ()
        logprobs = (None, *self.logprobs)
        self.is_reported, self.logprobs = True, []
        return tuple(
            PromptToken(token=token, logprobs=one)
            for token, one in zip(prompt_tokens, logprobs, strict=True)
        )


class Request:
    """The mutable state of one request; its owner is the worker.

    Attributes:
        spec: what was asked for.
        state: changed through ``transition`` only.
        slot: row of the KV cache, None while it holds none.
        order: admission number.
        speculation: changed through ``degrade`` only; its gamma is what the request wants now, at most.
        sequence: its tokens.
        cache: what the models' caches hold of them.
        constraint: what constrains the answer; None for nothing.
        group: who reads the prompt for whom.
        scores: log-probabilities of the prompt, to report; None where nobody asked. Of a group the first sample has
            them.
        timestamps: of submission, admission and first token.
        stats: acceptance figures.

    Args:
        max_context: tokens of a slot.
        decoder: turns tokens into text.
        submitted_at: seconds on the worker's clock.
        max_forced: tokens that the constraint may force behind a judged one.
        first: of the same group, whose tokens are copied.
    """

    def __init__(
        self,
        spec: RequestSpec,
        *,
        speculation: Speculation,
        max_context: int,
        decoder: Decoder,
        submitted_at: float,
        constraint: Constraint | None = None,
        max_forced: int = MOST_FORCED,
        first: Request | None = None,
    ) -> None:
        self.spec = spec
        self.state = State.QUEUED
        self.slot: int | None = None
        self.order = 0
        self.speculation = speculation
        given = None if first is None else first.sequence
        self.sequence: TokenSequence = TokenSequence(spec, max_context, given)
        self.cache = CacheState(
            num_exact=max_context,
            num_unread=len(spec.source_tokens),
            draft_computed=-1 if spec.source_tokens else 0,
        )
        self.constraint = constraint
        # What passes gave of forced tokens is told too, where log-probabilities are: then they are judged.
        self._max_forced = max_forced if spec.num_logprobs is None else 0
        self.group = GroupMembership()
        is_scored = spec.num_prompt_logprobs is not None and spec.sample == 0
        self.scores = PromptScores() if is_scored else None
        self.timestamps = Timestamps(submitted_at)
        self.stats = SpeculationStats(max_gamma=max(speculation.gamma, 0) + speculation.num_behind)
        self._undrafted: SamplingRow | None = None
        self._text = CompletionText(
            IncrementalDecoder(
                decoder, spec.prompt_tokens, skip_special_tokens=spec.skip_special_tokens
            ),
            StopScanner(spec.stop_strings, include_stop=spec.include_stop),
        )

    @property
    def text(self) -> IntArray:
        """[n] int64 view of what drafts may be found in: known tokens, behind a source that may be quoted."""
        return self.sequence.text if self.sequence.is_quoted else self.undrafted.history

    @property
    def undrafted(self) -> SamplingRow:
        """The row as a sampler sees it, without a draft; one object until tokens, slot or settings change."""
        row, spec, verifies_block = self._undrafted, self.spec, self.speculation.verifies_block
        sequence = self.sequence
        now = (sequence.num_known, self.slot, verifies_block)
        if row is None or (len(row.history), row.slot, row.verifies_block) != now:
            assert self.slot is not None
            row = self._undrafted = SamplingRow(
                index=self.slot,
                slot=self.slot,
                params=spec.params,
                mode=spec.speculation.mode,
                lenience=spec.speculation.lenience,
                seed=spec.seed,
                history=sequence.tokens[: sequence.num_known],
                num_prompt=sequence.num_prompt,
                verifies_block=verifies_block,
                num_logprobs=spec.num_logprobs,
            )
        return row

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far: of a beam search one per pass of each hypothesis that it is to answer with."""
        beams = self.spec.beams
        if beams is None:
            return self.sequence.num_output
        return self.stats.num_steps * beams.num_results

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are reported."""
        return self.scores is not None

    @property
    def has_ended(self) -> bool:
        """Whether the terminal event was decided."""
        return self.state in (State.FINISHED, State.FAILED)

    def transition(self, happening: RequestEvent) -> None:
        """Move along the lifecycle.

        Raises:
            IllegalTransition: the pair is not in ``LIFECYCLE``; the state is unchanged.
        """
        following = LIFECYCLE.get((self.state, happening))
        if following is None:
            raise IllegalTransition(f"{happening.name} cannot happen while {self.state.name}")
        self.state = following

    def admit(self, *, slot: int, order: int) -> None:
        """Give the request its slot; a prompt of one token has nothing to prefill, a source is read first."""
        has_source = self.cache.num_unread > 0
        self.transition(RequestEvent.ADMITTED_WITH_SOURCE if has_source else RequestEvent.ADMITTED)
        self.slot = slot
        self.order = order
        if not has_source:
            self._note_prompt_computed()

    def lead(self, others: Sequence[Request]) -> None:
        """Have others of the group wait while this one reads the prompt for all of them."""
        self.group.followers = tuple(others)
        for one in others:
            one.group.leader = self

    def leave_group(self) -> None:
        """Wait for nobody, and have the first of those that wait for this one read for the others."""
        group = self.group
        if group.leader is not None:
            others = group.leader.group
            others.followers = tuple(one for one in others.followers if one is not self)
            group.leader = None
        if group.followers:
            heir, *left = group.followers
            group.followers, heir.group.leader = (), None
            heir.lead(left)

    def commit_read(self) -> None:
        """Note that the target has read the source."""
        self.transition(RequestEvent.SOURCE_READ)
        self.cache.num_unread = 0
        self._note_prompt_computed()

    def commit_prefill(self, num_computed: int) -> None:
        """Move the target's pointer over prompt tokens that were fed; past the last, a first token follows."""
        self.cache.num_computed = num_computed
        self._note_prompt_computed()

    def commit_cached(self, num_tokens: int) -> None:
        """Note that the row holds leading tokens of the prompt that it was not fed."""
        self.cache.num_cached = num_tokens
        self.commit_prefill(num_tokens)

    def note_path(self, num_leading: int) -> None:
        """Note that a path of a tree is kept behind the next token, and how much of it is the tree's leading chain."""
        self.cache.num_exact = min(self.cache.num_exact, self.sequence.num_known + num_leading)

    def commit_scores(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Note the log-probabilities of prompt tokens from ``start + 1`` on; those noted from there on are replaced."""
        assert self.scores is not None
        self.scores.logprobs[start:] = logprobs

    def lose_cache(self) -> None:
        """The target's cache of a row that does not decode yet was lost: compute it again; a source is still there."""
        assert self.state in (State.READING, State.PREFILLING)
        self.cache.num_computed = 0
        self.cache.num_cached = 0

    def commit_draft_cache(self, num_computed: int) -> None:
        """Note that the draft's cache holds leading tokens of the prompt, all but the last at most."""
        self.cache.draft_computed = num_computed

    def lose_draft_cache(self) -> None:
        """The draft's cache was lost, its source too."""
        self.cache.draft_computed = -1 if self.spec.source_tokens else 0

    def degrade(
        self,
        fallback: str | None = None,
        *,
        reason: SpeculationDisabledReason = SpeculationDisabledReason.DEGRADED,
    ) -> None:
        """Go on without the drafter that failed or is paused: with another one, or plainly."""
        self.speculation = replace(
            self.speculation,
            drafter=fallback or self.speculation.drafter,
            gamma=self.speculation.gamma if fallback else 0,
            off_reason=reason,
            is_adaptive=self.speculation.is_adaptive and fallback is not None,
        )

    def fail(self) -> None:
        """End with an error; the slot is the caller's to free."""
        self.transition(RequestEvent.ENDED_BY_ERROR)
        self.leave_group()

    def commit(
        self,
        draft_tokens: tuple[int, ...],
        verdict: Verdict,
        *,
        num_drafted: int | None = None,
        draft_computed: int | None = None,
    ) -> tuple[Progressed, Ending | None]:
        """Append what was verified, up to whatever ends the answer first; everything after it is discarded.

        A request that was prefilling has its first token now, and decodes; no round of speculation is counted.

        Args:
            draft_tokens: the whole draft; of a tree the chain that was tried.
            verdict: its judgement, with a next token.
            num_drafted: tokens of the whole tree; None for a chain.
            draft_computed: leading tokens that the draft's cache holds; None where the step left it alone.

        Returns:
            What to tell the caller, and the ending if this was it.
        """
        is_prompt = self.state is State.PREFILLING
        if is_prompt:
            self.transition(RequestEvent.PROMPT_COMPUTED)
        assert verdict.next_token is not None
        cache, sequence = self.cache, self.sequence
        run, is_over = sequence.append((*draft_tokens[: verdict.num_accepted], verdict.next_token))
        cache.num_computed = sequence.num_known - 1
        said = run
        if self.constraint is not None and not is_over:
            forced, is_over = self._force(self.constraint, run)
            said = run + forced
        text, num_kept, ending = self._cut(said, is_over=is_over)
        if num_kept < len(said):
            self._take_back(len(said) - num_kept)
        run, forced = run[:num_kept], said[len(run) : num_kept]
        if ending is not None:
            self.transition(RequestEvent.STOPPED)
        if draft_computed is not None:
            # Not ``num_known - 1``: forced tokens stand where the cache may hold drafts that were rejected.
            cache.draft_computed = min(draft_computed, cache.num_computed)
        if not is_prompt:
            self.stats.record(
                gamma=len(draft_tokens),
                num_accepted=verdict.num_accepted,
                num_emitted=len(run),
                num_fallbacks=verdict.num_fallbacks,
                num_drafted=num_drafted,
            )
        self.stats.num_forced += len(forced)
        trace = StepTrace(
            draft_tokens=draft_tokens,
            num_accepted=min(verdict.num_accepted, num_kept),
            next_token=verdict.next_token if num_kept > verdict.num_accepted else None,
            is_prompt=is_prompt,
            forced=forced,
        )
        tokens = _emitted(run, verdict, len(draft_tokens), forced)
        prompt = () if self.scores is None else self.scores.take(self.spec.prompt_tokens)
        return Progressed(tokens=tokens, text=text, trace=trace, prompt=prompt), ending

    def report(self) -> SpeculationReport:
        """Acceptance figures so far."""
        report = self.stats.report(
            drafter=self.speculation.drafter,
            mode=self.spec.speculation.mode,
            lenience=self.spec.speculation.lenience,
            off_reason=self.speculation.off_reason,
        )
        return replace(report, verifies_block=self.speculation.verifies_block)

    def _note_prompt_computed(self) -> None:
        num_computed, num_known = self.cache.num_computed, self.sequence.num_known
        if num_computed == num_known - 1:
            self.transition(RequestEvent.PROMPT_COMPUTED)
        if self.group.followers and num_computed >= num_known - 1:
            self._release()

    def _release(self) -> None:
        """Have the followers stand where this one stands; their slots hold what its slot does."""
        followers, self.group.followers = self.group.followers, ()
        for one in followers:
            one.group.leader = None
            if one.cache.num_unread:
                one.commit_read()
            if self.cache.num_computed:
                one.commit_prefill(self.cache.num_computed)

    def _force(self, constraint: Constraint, run: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Append what the constraint forces behind a run that is appended; say whether the answer ends with it.

        Raises:
            RequestError: the constraint cannot be held any longer.
        """
        constraint.commit(run)
        forced: tuple[int, ...] = ()
        is_over = False
        while not is_over:
            tokens = self._uncontested(constraint.forced(self._max_forced - len(forced)))
            if not tokens:
                break
            tokens, is_over = self.sequence.append(tokens)
            forced += tokens
            if not is_over:
                constraint.commit(tokens)
        self.sequence.num_pending = len(forced)
        return forced, is_over

    def _uncontested(self, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading tokens that nothing else the request asks for may forbid; the next is judged."""
        params = self.spec.params
        allowed, banned = params.allowed_token_ids, {words[-1] for words in params.bad_words}
        for index, token in enumerate(forced):
            if token in banned or (allowed and token not in allowed):
                return forced[:index]
        return forced

    def _take_back(self, num_tokens: int) -> None:
        """Remove tokens behind a stop string, which ends the request; they were never said."""
        cache, sequence = self.cache, self.sequence
        sequence.take_back(num_tokens)
        cache.num_computed = min(cache.num_computed, sequence.num_known - 1)
        sequence.num_pending = sequence.num_known - 1 - cache.num_computed
        cache.draft_computed = min(cache.draft_computed, cache.num_computed)

    def _cut(self, run: tuple[int, ...], *, is_over: bool) -> tuple[str, int, Ending | None]:
        """Return text to show, tokens to keep, and the ending: a stop string, or one that is known already."""
        if self.spec.max_tokens == 0:
            return "", 0, Ending(reason=FinishReason.LENGTH, stop=None, text="")
        is_stopped = run[-1] in self.sequence.end_tokens
        shown = run[:-1] if is_stopped and not self.spec.include_stop else run
        text, num_kept, stop = self._text.push(shown)
        # An end token that is shown ends the answer by itself, whatever its text completes.
        if stop is not None and not (is_stopped and num_kept == len(run)):
            return text, num_kept, Ending(reason=FinishReason.STOP_STRING, stop=stop, text="")
        stop_token = run[-1] if is_stopped else None
        return text, len(run), self._ending(stop_token) if is_over else None

    def _ending(self, stop_token: int | None) -> Ending:
        reason = FinishReason.LENGTH if stop_token is None else FinishReason.STOP_TOKEN
        return Ending(reason=reason, stop=stop_token, text=self._text.finish())


def _emitted(
    tokens: tuple[int, ...], verdict: Verdict, num_drafted: int, forced: tuple[int, ...]
) -> tuple[EmittedToken, ...]:
    """Return the kept tokens of a verification, and those forced behind them, as they are told."""
    was_rejected = verdict.num_accepted < num_drafted
    last = Provenance.RECOVERED if was_rejected else Provenance.BONUS
    logprobs: tuple[TokenLogprobs | None, ...] = verdict.logprobs or (None,) * len(tokens)
    emitted: list[EmittedToken] = []
    for index, token in enumerate(tokens):
        provenance = Provenance.ACCEPTED if index < verdict.num_accepted else last
        emitted.append(EmittedToken(token=token, provenance=provenance, logprobs=logprobs[index]))
    if forced:
        emitted += [EmittedToken(token=token, provenance=Provenance.FORCED) for token in forced]
    return tuple(emitted)
