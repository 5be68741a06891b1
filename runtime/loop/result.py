"""What one step did: one value, built at the end of the step by whoever took it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from outrider.engines.base import step_value
from outrider.runtime.core.events import Finished, Progressed
from outrider.runtime.core.request import Ending, Request

Progress = tuple[Request, Progressed, Ending | None]
Failure = tuple[Request, Exception | None]
"""A request that cannot go on, and the error; None where its logits were not finite."""


@step_value
class StepResult:
    """What a step did.

    Attributes:
        progressed: requests that emitted, and their ending if that was it.
        failed: requests whose own rows show that they cannot go on.
        alone: requests for which the engine failed although nobody else took part. Where ``is_sound``, the fault is
            theirs.
        is_sound: whether the engine served anybody in this step.
        called: as of ``Proposals``.
        host_fallback_reason: why the host took part between draft and judgement; empty where it did not, None where
            nothing was decoded.
        searched: beam searches that are over, and their answers.
        num_search_passes: searches that a pass of the target took a step further.
        reads: per read of the target that went well, the source tokens and the seconds it took.
    """

    progressed: Sequence[Progress] = ()
    failed: Sequence[Failure] = ()
    alone: Sequence[Failure] = ()
    is_sound: bool = False
    called: Mapping[str, Exception | None] = field(default_factory=dict)
    host_fallback_reason: str | None = None
    searched: Sequence[tuple[Request, Finished]] = ()
    num_search_passes: int = 0
    reads: Sequence[tuple[int, float]] = ()


NOTHING_DONE = StepResult()


def with_searches(rows: StepResult, searches: StepResult) -> StepResult:
    """Return what a step did for rows and for searches, as one result."""
    return replace(
        rows,
        failed=[*rows.failed, *searches.failed],
        alone=[*rows.alone, *searches.alone],
        is_sound=rows.is_sound or searches.is_sound,
        searched=searches.searched,
        num_search_passes=searches.num_search_passes,
        reads=[*rows.reads, *searches.reads],
    )
