from __future__ import annotations

from collections.abc import Sequence

import pytest
from outrider.engines.sampling.base import SamplingParams, TokenLogprobs, Verdict
from outrider.runtime.core.events import FinishReason, Provenance
from outrider.runtime.core.lifecycle import LIFECYCLE, IllegalTransition, RequestEvent, State
from outrider.runtime.core.params import RequestSpec
from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.core.sequence import SEPARATOR
from outrider.runtime.grammar.base import Constraint


class LetterDecoder:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 10,
    end_tokens: tuple[int, ...] = (),
    max_context: int = 50,
    constraint: Constraint | None = None,
    **fields: object,
) -> Request:
    spec = RequestSpec(
        internal_id="i",
        request_id="r",
        prompt_tokens=tuple(prompt),
        params=SamplingParams(end_token_ids=end_tokens),
        seed=0,
        max_tokens=max_tokens,
        **fields,
    )
    return Request(
        spec,
        speculation=Speculation(drafter="model", gamma=4, off_reason=None),
        max_context=max_context,
        decoder=LetterDecoder(),
        submitted_at=0.0,
        constraint=constraint,
    )


def decoding(**options: object) -> Request:
    made = request(**options)
    made.admit(slot=0, order=0)
    made.commit_prefill(made.sequence.num_prompt - 1)
    return made


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("happening", RequestEvent)
def test_the_lifecycle_is_its_table(state: State, happening: RequestEvent) -> None:
    made = request()
    made.state = state
    if (state, happening) in LIFECYCLE:
        made.transition(happening)
        assert made.state is LIFECYCLE[state, happening]
    else:
        with pytest.raises(IllegalTransition):
            made.transition(happening)
        assert made.state is state


def test_ended_requests_never_change_again() -> None:
    assert not any(state in (State.FINISHED, State.FAILED) for state, _ in LIFECYCLE)
    assert all((state, RequestEvent.ENDED_BY_ERROR) in LIFECYCLE for state in list(State)[:4])


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    made = request((5,))
    made.admit(slot=2, order=9)
    assert (made.state, made.slot, made.order) == (State.DECODING, 2, 9)


def test_a_prompt_decodes_once_all_but_its_last_token_is_computed() -> None:
    made = request((5, 6, 7))
    made.admit(slot=0, order=0)
    made.commit_prefill(1)
    assert made.state is State.PREFILLING
    made.commit_prefill(2)
    assert made.state is State.DECODING


def test_a_first_token_out_of_the_prompts_pass_begins_decoding_and_counts_as_no_pass() -> None:
    made = request((5, 6, 7))
    made.admit(slot=0, order=0)
    made.commit_prefill(3)
    assert made.state is State.PREFILLING
    progressed, ending = made.commit((), Verdict(num_accepted=0, next_token=8))
    assert ending is None
    assert made.state is State.DECODING
    assert made.cache.num_computed == 3 == made.sequence.num_known - 1
    assert progressed.trace.is_prompt
    assert (made.report().num_steps, made.report().num_emitted) == (0, 0)
    progressed, _ = made.commit((9,), Verdict(num_accepted=1, next_token=0))
    assert not progressed.trace.is_prompt
    assert (made.report().num_steps, made.report().num_emitted) == (1, 2)


def test_a_first_token_that_stops_ends_the_request() -> None:
    made = request((5, 6, 7), end_tokens=(2,))
    made.admit(slot=0, order=0)
    made.commit_prefill(3)
    _, ending = made.commit((), Verdict(num_accepted=0, next_token=2))
    assert ending is not None and ending.reason is FinishReason.STOP_TOKEN
    assert made.state is State.FINISHED


def test_a_commit_moves_tokens_pointer_and_text() -> None:
    made = decoding()
    progressed, ending = made.commit((4, 5, 9), Verdict(num_accepted=2, next_token=6))
    assert ending is None
    assert made.sequence.history.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.cache.num_computed == made.sequence.num_known - 1 == 5
    assert (made.sequence.num_output, made.sequence.num_remaining) == (3, 7)
    assert progressed.text == "efg"
    assert [t.provenance for t in progressed.tokens] == [
        Provenance.ACCEPTED,
        Provenance.ACCEPTED,
        Provenance.RECOVERED,
    ]
    assert progressed.trace.draft_tokens == (4, 5, 9)


def test_a_full_acceptance_ends_in_a_bonus_token() -> None:
    progressed, _ = decoding().commit((4,), Verdict(num_accepted=1, next_token=6))
    assert progressed.tokens[-1].provenance is Provenance.BONUS


def test_a_stop_token_cuts_the_run() -> None:
    """The hand example: run [17, 2, 5] and 9 with end token 2 emits [17, 2]."""
    made = decoding(end_tokens=(2,))
    entry = TokenLogprobs(logprob=-1.0, top=())
    progressed, ending = made.commit(
        (17, 2, 5), Verdict(num_accepted=3, next_token=9, logprobs=(entry,) * 4)
    )
    assert [t.token for t in progressed.tokens] == [17, 2]
    assert ending is not None
    assert (ending.reason, ending.stop) == (FinishReason.STOP_TOKEN, 2)
    assert made.sequence.num_output == made.report().num_accepted == 2
    assert progressed.text == "r"
    assert made.state is State.FINISHED


def test_a_stop_tokens_text_is_shown_on_request() -> None:
    made = decoding(end_tokens=(2,), include_stop=True, stop_strings=("rc",))
    progressed, ending = made.commit((17, 2), Verdict(num_accepted=2, next_token=9))
    assert progressed.text == "rc"
    assert ending is not None
    assert ending.stop == 2


def test_a_stop_string_may_span_two_steps() -> None:
    made = decoding(stop_strings=("fg",))
    first, ending = made.commit((4,), Verdict(num_accepted=1, next_token=5))
    assert (first.text, ending) == ("e", None)
    second, ending = made.commit((6, 7), Verdict(num_accepted=2, next_token=8))
    assert second.text == ""
    assert [t.token for t in second.tokens] == [6]
    assert ending is not None
    assert (ending.reason, ending.stop, ending.text) == (FinishReason.STOP_STRING, "fg", "")


def test_max_tokens_cuts_a_run_of_four() -> None:
    made = decoding(max_tokens=2, stop_strings=("fz",))
    progressed, ending = made.commit((4, 5, 6), Verdict(num_accepted=3, next_token=7))
    assert [t.token for t in progressed.tokens] == [4, 5]
    assert ending is not None
    assert (ending.reason, ending.stop) == (FinishReason.LENGTH, None)
    assert progressed.text + ending.text == "ef"


@pytest.mark.parametrize(
    ("options", "num_accepted", "next_token"),
    [
        ({}, 3, 7),
        ({"max_tokens": 4}, 3, 7),
        ({"max_tokens": 3}, 3, None),
        ({"max_tokens": 1}, 1, None),
        ({"end_tokens": (5,)}, 2, None),
        ({"end_tokens": (7,)}, 3, 7),
        ({"stop_strings": ("ef",)}, 2, None),
        ({"stop_strings": ("h",)}, 3, 7),
    ],
)
def test_a_trace_names_the_tokens_that_the_answer_has_and_no_other(
    options: dict[str, object], num_accepted: int, next_token: int | None
) -> None:
    progressed, _ = decoding(**options).commit((4, 5, 6), Verdict(num_accepted=3, next_token=7))
    trace = progressed.trace
    assert (trace.num_accepted, trace.next_token) == (num_accepted, next_token)
    added = () if next_token is None else (next_token,)
    named = trace.draft_tokens[:num_accepted] + added
    assert named == tuple(token.token for token in progressed.tokens)


def test_the_context_bounds_the_answer() -> None:
    assert request(max_context=5).sequence.num_remaining == 2


class Forcing:
    """A form that forces these tokens behind the first run, and nothing later."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def commit(self, tokens: Sequence[int]) -> None:
        pass

    def forced(self, most: int) -> tuple[int, ...]:
        found, self._tokens = self._tokens, ()
        return found


@pytest.mark.parametrize("forced", [(), (8,), (8, 9, 8), (8, 9, 8, 9, 8, 9)], ids=len)
@pytest.mark.parametrize(
    ("num_accepted", "expected"), [(0, 5), (1, 6), (2, 7), (3, 7)], ids=["0", "1", "2", "all"]
)
def test_the_drafts_cache_ends_before_its_first_rejected_token_whatever_is_forced(
    num_accepted: int, expected: int, forced: tuple[int, ...]
) -> None:
    """Of five tokens and gamma 3 it held seven: the last draft token is never fed."""
    made = decoding(prompt=(1, 2, 3, 1, 2), max_tokens=20, constraint=Forcing(*forced))
    made.commit_draft_cache(4)
    verdict = Verdict(num_accepted=num_accepted, next_token=6)
    made.commit((4, 5, 7), verdict, draft_computed=7)
    assert made.sequence.num_known == 6 + num_accepted + len(forced)
    assert made.sequence.num_pending == len(forced)
    assert made.cache.draft_computed == expected
    # The next draft stands behind the forced tokens, which it was fed.
    num_known = made.sequence.num_known
    made.commit((4, 5, 7), Verdict(num_accepted=1, next_token=6), draft_computed=num_known + 2)
    assert made.cache.draft_computed == num_known + 1


@pytest.mark.parametrize("stop", ["gi", "gij", "gijik"])
def test_a_stop_string_among_forced_tokens_leaves_the_drafts_cache_what_was_accepted(
    stop: str,
) -> None:
    made = decoding(stop_strings=(stop,), constraint=Forcing(8, 9, 8, 10))
    _, ending = made.commit((4, 5, 7), Verdict(num_accepted=0, next_token=6), draft_computed=5)
    assert ending is not None
    assert made.sequence.num_known == 3 + len(stop)
    assert made.cache.draft_computed == 3


def test_a_step_without_a_draft_leaves_its_cache_alone() -> None:
    made = decoding(constraint=Forcing(8, 9))
    made.commit_draft_cache(1)
    made.commit((), Verdict(num_accepted=0, next_token=6))
    assert made.cache.draft_computed == 1


def test_a_degraded_request_drafts_no_more() -> None:
    made = decoding()
    assert made.speculation.gamma == 4
    made.degrade()
    assert made.speculation.gamma == made.cache.draft_computed == 0
    assert made.report().off_reason == "DEGRADED"


def test_a_failed_request_has_ended() -> None:
    made = request()
    assert not made.has_ended
    made.fail()
    assert made.has_ended


def sourced(prefix: Sequence[int] = (5,), **options: object) -> Request:
    return request(prefix, source_tokens=(7, 8, 9), **options)


def test_a_source_is_read_before_anything_is_computed() -> None:
    made = sourced((5, 6))
    assert (made.cache.num_unread, made.cache.draft_computed) == (3, -1)
    made.admit(slot=0, order=0)
    assert made.state is State.READING
    made.lose_cache()
    made.commit_read()
    assert (made.state, made.cache.num_unread) == (State.PREFILLING, 0)
    with pytest.raises(IllegalTransition):
        made.commit_read()
    made.commit_prefill(1)
    assert made.state is State.DECODING


def test_a_prefix_of_one_token_decodes_once_the_source_is_read() -> None:
    made = sourced()
    made.admit(slot=0, order=0)
    made.commit_read()
    assert made.state is State.DECODING
    assert made.cache.draft_computed == -1


def test_the_sampler_sees_the_decoders_text_and_drafters_the_source_before_it() -> None:
    made = sourced()
    made.admit(slot=0, order=0)
    made.commit_read()
    made.commit((), Verdict(num_accepted=0, next_token=2))
    assert made.sequence.history.tolist() == made.undrafted.history.tolist() == [5, 2]
    assert made.undrafted.num_prompt == 1
    assert made.text.tolist() == [7, 8, 9, SEPARATOR, 5, 2]
    assert made.sequence.num_output == 1
    assert made.spec.num_prompt_tokens == 3


def test_a_source_that_may_not_be_quoted_is_no_text() -> None:
    made = sourced(source_is_quotable=False)
    made.admit(slot=0, order=0)
    assert made.text.tolist() == made.sequence.history.tolist() == [5]


def test_a_lost_draft_cache_has_the_source_to_read_again() -> None:
    made = sourced()
    made.admit(slot=0, order=0)
    made.commit_read()
    made.commit_draft_cache(0)
    assert made.cache.draft_computed == 0
    made.lose_draft_cache()
    assert made.cache.draft_computed == -1
    plain = decoding()
    plain.lose_draft_cache()
    assert plain.cache.draft_computed == 0
