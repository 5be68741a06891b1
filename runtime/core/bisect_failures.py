"""Finds out for whom a call fails that serves many.

One call serves many requests; when it raises, it does not say for whom. Parts of the group are tried, smaller and
smaller, until every member went well in some part or failed alone. Knows nothing of what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Member = TypeVar("Member")
Done = TypeVar("Done")


def bisect_failures(
    group: Sequence[Member], attempt: Callable[[Sequence[Member]], Done]
) -> tuple[list[Done], list[tuple[Member, Exception]]]:
    """Do for parts of a group what failed for the whole of it.

    Args:
        group: failed together once; at least one member.
        attempt: does the work for neighbours of the group. When it raises, it has changed nothing but what it can
            do again.

    Returns:
        What the attempts that went well gave, in order, and the members that failed alone twice, with the error.
    """
    if len(group) == 1:
        try:
            return [attempt(group)], []
        except Exception as error:  # whatever the work may raise
            return [], [(group[0], error)]
    done: list[Done] = []
    failed: list[tuple[Member, Exception]] = []
    middle = len(group) // 2
    for half in (group[:middle], group[middle:]):
        try:
            done.append(attempt(half))
        except Exception:  # whatever the work may raise; a part tells whose fault it is
            more, guilty = bisect_failures(half, attempt)
            done += more
            failed += guilty
    return done, failed
