"""A smaller model drafts, one token after another, for all chosen rows in lockstep.

Between steps the draft's cache of a row holds ``num_computed <= n - 1`` of its n committed tokens.
Before drafting the missing ones are fed: one after a rejection, two after a full acceptance, more
after steps without a draft and after forced tokens. A row that misses more than a round can leave behind is lagging: it
is fed by at most one chunk per step, together with neighbours that miss about as much, so that it pads
nobody. Rows whose gamma is chosen share one chunk. A row of a fixed gamma has one of its own: when
its drafts begin decides which noise its draws use, so it must not depend on its neighbours. Those
that enter come one chunk of the target's per step.

Of a group, whose rows have prompt and source in common, one row is fed these, and its slot is copied to the others'.

A draft model that was taught to continue over a token that stands for those to come drafts all tokens of a round in one
call. Its rows depend on the committed text alone: each is a distribution given the past, and judged as any other
(Leviathan et al. 2023, section 3.6). Nothing that was computed of such a token stays in its cache.

A head (``engines.heads``) is called as a draft model is. It reads committed tokens beside the target's features, and
drafted ones beside its own answers, so these are fed again when they are committed.

A draft model with an encoder reads a row's source when it is first asked to draft for it. The source counts as tokens
that the row misses, and is read whole as long as anything is left of the step's chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from outrider.engines.base import Engine, Source, Span, step_value
from outrider.engines.sampling.base import ExactnessMode, SamplingRow
from outrider.runtime.core.drafting import num_left_out
from outrider.runtime.core.scheduler import alike_neighbours
from outrider.runtime.drafters.base import (
    Draft,
    DrafterCapabilities,
    DrafterParts,
    DraftRow,
    Need,
    Outcome,
)
from outrider.runtime.drafters.model.prompt_end import PromptEndEngine

MAX_SHARED_MISSING = 2
"""Tokens a row may miss and still be fed with the others: those a full acceptance leaves."""


def most_shared_missing(draft: Engine | None, max_gamma: int) -> int:
    """Return how many tokens a row may miss and be fed with others.

    Of a round of a parallel draft, or of a head, nothing that was computed of drafts stays.
    """
    if draft is None:
        return MAX_SHARED_MISSING
    keeps_none = draft.limits.parallel_token is not None or draft.limits.reads_features > 0
    return max_gamma + 1 if keeps_none else MAX_SHARED_MISSING


@step_value
class Ready:
    """The rows as they are before a model drafts for them.

    Attributes:
        computed: per live slot, leading tokens valid in the draft model's cache; -1 where a source is unread.
        gammas: by slot, ascending, how many tokens each chosen row that can be drafted for wants.
    """

    computed: Sequence[int]
    gammas: dict[int, int]


class ModelDrafter:
    """Proposes chains of a draft model."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(
        needs=frozenset({Need.DRAFT_MODEL}), is_sampled=True
    )
    max_shared_missing: int

    def __init__(self, parts: DrafterParts) -> None:
        assert parts.draft is not None, "offered only where there is a draft model"
        self._engine = parts.draft
        self._limits = parts.draft.limits
        self._sampler = parts.sampler
        self._target_vocab_size = parts.vocab_size
        self._chunk = min(parts.chunk, self._limits.max_extend)
        self.max_shared_missing = most_shared_missing(parts.draft, parts.max_gamma)

    @classmethod
    def from_parts(cls, parts: DrafterParts) -> Self:
        """Draft with the bundle's draft model."""
        return cls(parts)

    def propose(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> list[Draft]:
        """Draft for the chosen rows that are, or can be brought, up to date."""
        ready = self.prepare(live, chosen)
        computed = list(ready.computed)
        if (unknown := self._limits.parallel_token) is not None:
            tokens = self._draft_at_once(live, ready.gammas, computed, unknown)
        else:
            tokens = self._draft_in_lockstep(live, ready.gammas, computed)
        if self._limits.reads_features:
            # Behind what the target has judged it read its own answers, or nothing, in place of features that there
            # will be by then.
            computed = [
                min(count, len(row.sampling.history) - row.num_pending)
                for count, row in zip(computed, live, strict=True)
            ]
        num_calls = None if unknown is None else 1
        return [
            chain_draft(live[slot], tokens.get(slot, ()), computed[slot], num_calls)
            for slot in chosen
        ]

    def prepare(self, live: Sequence[DraftRow], chosen: Sequence[int]) -> Ready:
        """Bring chosen rows up to date as far as one step may, and say how much each may draft."""
        computed = [row.num_computed for row in live]
        usable = [slot for slot in chosen if self._can_feed(live[slot])]
        if isinstance(self._engine, PromptEndEngine):
            for slot in usable:
                computed[slot] = self._leave_out(self._engine, live[slot], slot)
        # A row alone pads nobody: the call that drafts feeds it a whole chunk, instead of one before it.
        if len(live) > 1 or any(_num_missing(live, s, computed) > self._chunk for s in usable):
            self._catch_up(live, usable, computed)
            usable = [slot for slot in usable if self._is_ready(live, slot, computed)]
        elif usable and computed[0] < 0:
            self._read_together(live, {0: len(live[0].source)}, computed)
        gammas = {slot: gamma for slot in usable if (gamma := self._gamma(live[slot])) > 0}
        return Ready(computed=computed, gammas=gammas)

    def _leave_out(self, engine: PromptEndEngine, row: DraftRow, slot: int) -> int:
        """Leave out what a row need not read of its prompt; return what counts as computed.

        Where gamma is fixed nothing is: its drafts are as good as the model's. A group's rows copy what one has read.
        """
        if not row.is_adaptive or row.group or row.gamma <= 0:
            return row.num_computed
        num_tokens = num_left_out(len(row.sampling.history), row.num_remaining)
        if num_tokens <= row.num_computed:
            return row.num_computed
        # What it has read of the beginning, such as a prefix that was kept, is given up.
        engine.leave_out(slot, num_tokens)
        return num_tokens

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn nothing: the request keeps the cache pointers."""

    def forget(self, key: str) -> None:
        """Keep nothing per request outside the engine's slots."""

    def _can_feed(self, row: DraftRow) -> bool:
        """Return whether the draft model knows the tokens it misses and has room for them."""
        limits, history = self._limits, row.sampling.history
        if len(history) > limits.max_context or len(row.source) > limits.max_source:
            return False
        if limits.vocab_size >= self._target_vocab_size:
            return True
        return bool(history[max(row.num_computed, 0) :].max() < limits.vocab_size)

    def _gamma(self, row: DraftRow) -> int:
        """Return the row's gamma as far as the context reaches; the last draft token is never fed."""
        return min(row.gamma, self._limits.max_context + 1 - len(row.sampling.history))

    def _is_ready(self, live: Sequence[DraftRow], slot: int, computed: Sequence[int]) -> bool:
        """Return whether what a row misses may be fed with the others."""
        num_missing = _num_missing(live, slot, computed)
        return computed[slot] >= 0 and num_missing <= self.max_shared_missing

    def _catch_up(
        self, live: Sequence[DraftRow], slots: Sequence[int], computed: list[int]
    ) -> None:
        # Those that miss least are ready first; a stream that lags never waits for a prompt.
        lagging = [slot for slot in slots if not self._is_ready(live, slot, computed)]
        if not lagging:
            return
        lagging.sort(key=lambda s: _num_missing(live, s, computed))
        shared = self._chunk
        sources: dict[int, int] = {}
        lengths: dict[int, int] = {}
        following = _followers(live, slots, lagging, computed)
        for slot in lagging:
            if slot in following:
                continue
            is_sharing = live[slot].is_adaptive
            budget = shared if is_sharing else self._chunk
            if budget <= 0:
                continue
            num_read, length = _missing_within(budget, live[slot], computed[slot])
            if num_read:
                sources[slot] = num_read
            if length:
                lengths[slot] = length
            shared -= num_read + length if is_sharing else 0
        while sources:
            self._read_together(live, sources, computed)
        while lengths:
            self._feed_together(live, lengths, computed)
        for slot, leader in following.items():
            if length := self._copy_prompt(live[slot], slot, leader, computed):
                lengths[slot] = length
        while lengths:
            self._feed_together(live, lengths, computed)

    def _copy_prompt(self, row: DraftRow, slot: int, leader: int, computed: list[int]) -> int:
        """Copy to a slot what another one holds of their prompt.

        Returns:
            Tokens to feed it then. A row of a fixed gamma gets as far as its own chunk would have brought it.
        """
        end = num_shared = min(computed[leader], row.sampling.num_prompt)
        if not row.is_adaptive:
            end = max(computed[slot], 0) + _missing_within(self._chunk, row, computed[slot])[1]
        num_shared = min(end, num_shared)
        if num_shared < self._engine.first_start(leader):
            # The leader's states are of more tokens.
            return _missing_within(self._chunk, row, computed[slot])[1]
        if num_shared > computed[slot]:
            self._engine.move_slot(leader, slot, num_shared)
            computed[slot] = num_shared
        return 0 if computed[slot] < 0 else max(0, end - computed[slot])

    def _read_together(
        self, live: Sequence[DraftRow], lengths: dict[int, int], computed: list[int]
    ) -> None:
        """Read the source of the first of these slots, and with it those beside it as ``_feed_together`` does."""
        slots = self._neighbours(lengths)
        self._engine.read([Source(slot=slot, tokens=live[slot].source) for slot in slots])
        for slot in slots:
            del lengths[slot]
            computed[slot] = 0

    def _neighbours(self, lengths: Mapping[int, int]) -> range:
        """Return the first of these slots and those beside it that are worth one call."""
        limits = self._limits
        return alike_neighbours(
            next(iter(lengths)),
            lengths,
            rank=lengths.__getitem__,
            most_tokens=self._chunk,
            most_rows=limits.max_prompt_rows or limits.max_batch,
        )

    def _feed_together(
        self, live: Sequence[DraftRow], lengths: dict[int, int], computed: list[int]
    ) -> None:
        """Feed the first of these slots, and with it those beside it that miss about as much; they leave."""
        spans = []
        for slot in self._neighbours(lengths):
            start, length = computed[slot], lengths.pop(slot)
            tokens = tuple(live[slot].sampling.history[start : start + length].tolist())
            spans.append(
                Span(slot=slot, start=start, tokens=tokens, num_logits=0, num_settled=length)
            )
        self._engine.extend(spans)
        for span in spans:
            computed[span.slot] += len(span.tokens)

    def _draft_in_lockstep(
        self, live: Sequence[DraftRow], gammas: dict[int, int], computed: list[int]
    ) -> dict[int, list[int]]:
        drafted, rows, fed = begun(live, gammas, computed)
        while fed:
            logits = self._engine.extend(_spans(fed, computed, drafted))
            tokens = self._sampler.propose(
                logits, [rows[slot] for slot in fed], vocab_size=self._target_vocab_size
            )
            following: dict[int, tuple[int, ...]] = {}
            for slot, token in zip(fed, tokens, strict=True):
                computed[slot] += len(fed[slot])
                if _goes_on(live[slot], drafted[slot], token, gammas[slot]):
                    following[slot] = (token,)
            fed = following
        return drafted

    def _draft_at_once(
        self,
        live: Sequence[DraftRow],
        gammas: dict[int, int],
        computed: list[int],
        unknown: int,
    ) -> dict[int, list[int]]:
        """Draft all tokens of a round in one call, which is fed ``unknown`` for each token but the last."""
        drafted, rows, fed = begun(live, gammas, computed)
        spans = {}
        for slot, tokens in fed.items():
            num_unknown = min(gammas[slot] - 1, self._limits.max_extend - len(tokens))
            spans[slot] = Span(
                slot=slot,
                start=max(computed[slot], 0),
                tokens=(*tokens, *[unknown] * num_unknown),
                num_logits=1 + num_unknown,
                num_settled=len(tokens),
            )
            computed[slot] += len(tokens)
        logits = self._engine.extend(with_idle_slots(spans, computed)) if spans else None
        drafting = list(spans)
        while drafting:
            assert logits is not None
            column = len(drafted[drafting[0]])
            proposed = self._sampler.propose(
                logits[:, column:],
                [rows[slot] for slot in drafting],
                vocab_size=self._target_vocab_size,
            )
            drafting = [
                slot
                for slot, token in zip(drafting, proposed, strict=True)
                if _goes_on(live[slot], drafted[slot], token, spans[slot].num_logits)
            ]
        return drafted


def _goes_on(row: DraftRow, drafted: list[int], token: int, most: int) -> bool:
    """Add a token to a draft of ``most`` tokens, and return whether another follows, whose mask is there then."""
    drafted.append(token)
    if len(drafted) >= most or token in row.sampling.params.end_token_ids:
        return False
    if row.constraint is not None:
        row.constraint.follow(drafted)
    return True


def begun(
    live: Sequence[DraftRow], gammas: Mapping[int, int], computed: Sequence[int]
) -> tuple[dict[int, list[int]], dict[int, SamplingRow], dict[int, tuple[int, ...]]]:
    """Return by slot the empty draft, the row that sees it grow, and the committed tokens to feed first."""
    drafted: dict[int, list[int]] = {slot: [] for slot in gammas}
    # The lists grow under the rows, and so do masks: building a row anew for every token costs 2 % of a step.
    rows = {slot: replace(live[slot].sampling, draft_tokens=drafted[slot]) for slot in gammas}
    for slot in gammas:
        if (constraint := live[slot].constraint) is not None:
            rows[slot] = replace(rows[slot], masks=constraint.begin(gammas[slot]))
    fed = {slot: tuple(live[slot].sampling.history[computed[slot] :].tolist()) for slot in gammas}
    return drafted, rows, fed


def _spans(
    fed: Mapping[int, tuple[int, ...]],
    computed: Sequence[int],
    drafted: Mapping[int, Sequence[int]],
) -> list[Span]:
    """Return spans of tokens to feed, by slot; the last logits of each are wanted."""
    spans = []
    for slot in range(max(fed) + 1):
        tokens = fed.get(slot, ())
        wanted = 1 if tokens else 0
        start = max(computed[slot], 0)
        spans.append(
            Span(
                slot=slot,
                start=start,
                tokens=tokens,
                num_logits=wanted,
                num_settled=num_committed(tokens, drafted.get(slot, ())),
            )
        )
    return spans


def num_committed(fed: Sequence[int], drafted: Sequence[int]) -> int:
    """Return how many of the tokens to feed are committed: all of a round's first pass, later none."""
    return 0 if drafted else len(fed)


def with_idle_slots(spans: Mapping[int, Span], computed: Sequence[int]) -> list[Span]:
    """Return the spans of all live slots: these by slot, and empty ones."""
    return [
        spans.get(slot, Span(slot=slot, start=max(start, 0), tokens=(), num_logits=0))
        for slot, start in enumerate(computed)
    ]


def _followers(
    live: Sequence[DraftRow], slots: Sequence[int], lagging: Sequence[int], computed: Sequence[int]
) -> dict[int, int]:
    """Return the lagging slots that lack some of their group's prompt, each with the slot to copy it from."""
    in_groups = [slot for slot in lagging if live[slot].group]
    if not in_groups:
        return {}
    leaders = {live[slot].group: slot for slot in slots if slot not in lagging}
    for slot in in_groups:
        leaders.setdefault(live[slot].group, slot)
    return {
        slot: leader
        for slot in in_groups
        if (leader := leaders[live[slot].group]) != slot
        and computed[slot] < live[slot].sampling.num_prompt
    }


def _missing_within(budget: int, row: DraftRow, computed: int) -> tuple[int, int]:
    """Return the tokens of a row that it is given of a budget: of its source, which is read whole, and of its text."""
    num_read = len(row.source) if computed < 0 else 0
    num_left = len(row.sampling.history) - 1 - max(computed, 0)
    return num_read, max(0, min(budget - num_read, num_left))


def _num_missing(live: Sequence[DraftRow], slot: int, computed: Sequence[int]) -> int:
    """Return the tokens of a row that the draft model has to read and to be fed."""
    num_unread = len(live[slot].source) if computed[slot] < 0 else 0
    return num_unread + len(live[slot].sampling.history) - max(computed[slot], 0)


def chain_draft(
    row: DraftRow, tokens: Sequence[int], num_computed: int, num_calls: int | None = None
) -> Draft:
    """Return a chain of the draft model as a draft."""
    return Draft(
        tokens=tuple(tokens),
        is_sampled=is_sampled(row),
        num_computed=num_computed,
        num_calls=num_calls,
    )


def is_sampled(row: DraftRow) -> bool:
    """Return whether verification needs the draft's probabilities: not for greedy, nor under shared noise."""
    return not row.sampling.params.is_greedy and row.sampling.mode is not ExactnessMode.SEED_STABLE
