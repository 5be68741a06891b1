"""Ways of decoding by side, the order in which they run, and the figures of their answers; starts no process.

Answers are kept by cell and round, so that two cells can be compared round by round: the machine drifts between rounds,
hardly within one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

from scripts.lab.peers.jobs import OURS
from scripts.tools.results import Row

PEER_DRAFTERS = ("model", "lookup", "chained-lookup")
"""Ways to draft that a peer may have: a draft model, prompt lookup, prompt lookup that goes on from what it found."""

PLAIN, DRAFTING, ANY = "plain", "drafting", "any"
CHOSEN = "auto"
"""A gamma that the side chooses itself."""

Answer = Mapping[str, Any]
Answers = Mapping["Cell", Mapping[int, Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One side's one way of decoding.

    Attributes:
        drafter: None is plain decoding.
        gamma: None where the side chooses; of a drafter that it lacks, 0 stands for every gamma.
    """

    who: str
    weights: str
    batch: int
    drafter: str | None = None
    gamma: int | None = 0

    @property
    def way(self) -> str:
        """The cell's way of decoding, in words."""
        if self.drafter is None:
            return PLAIN
        if self.gamma is None:
            return f"{self.drafter} gamma {CHOSEN}"
        return f"{self.drafter} gamma {self.gamma}" if self.gamma else self.drafter

    @property
    def kind(self) -> str:
        """Plain or drafting."""
        return PLAIN if self.drafter is None else DRAFTING

    @property
    def at_any_gamma(self) -> Cell:
        """The cell that stands for this drafter's every gamma."""
        return replace(self, gamma=0)


def cells_of(
    drafters: Mapping[str, Sequence[str]], weights: str, batch: int, gammas: Sequence[int | None]
) -> list[Cell]:
    """All cells of one batch size and weights, sides taking turns: their plain cells, then one drafting cell each.

    Args:
        drafters: of each side, in the order of the sides.
        weights: of every cell.
        batch: of every cell.
        gammas: of each drafter; None where sides choose.
    """
    plain = [Cell(who=who, weights=weights, batch=batch) for who in drafters]
    sides = [
        [replace(cell, drafter=name, gamma=gamma) for gamma in gammas for name in drafters[cell.who]]
        for cell in plain
    ]  # fmt: skip
    turns = chain.from_iterable(zip_longest(*sides))
    return [*plain, *(cell for cell in turns if cell is not None)]


def contenders(cells: Sequence[Cell], answers: Answers, keep: int) -> list[Cell]:
    """The cells that a further round is spent on: all plain ones, and each side's ``keep`` fastest that draft."""
    kept: set[Cell] = set()
    for who in {cell.who for cell in cells}:
        for kind, count in ((PLAIN, 1), (DRAFTING, keep)):
            kept.update(_fastest(_of(cells, who, kind), answers)[:count])
    return [cell for cell in cells if cell in kept]


def speed(answer: Answer) -> float:
    """Tokens per second."""
    return sum(len(output) for output in answer["outputs"]) / float(answer["seconds"])


def speeds(answers: Mapping[int, Answer]) -> dict[int, float]:
    """Tokens per second of the rounds that were answered."""
    return {number: speed(one) for number, one in answers.items() if "seconds" in one}


def round_ratios(ours: Mapping[int, Answer], theirs: Mapping[int, Answer]) -> list[float]:
    """Our speed through theirs in each round that both answered."""
    mine, others = speeds(ours), speeds(theirs)
    return [mine[number] / others[number] for number in sorted(mine.keys() & others.keys())]


def best_of(cells: Iterable[Cell], answers: Answers) -> Cell | None:
    """The cell of the highest median among those that were run most often; None if none was answered.

    Those that ran less often were behind when the others went on.
    """
    fastest = _fastest(cells, answers)
    most = max((len(speeds(answers[cell])) for cell in fastest), default=0)
    return next((cell for cell in fastest if len(speeds(answers[cell])) == most), None)


def best_rows(cells: Sequence[Cell], answers: Answers) -> list[Row]:
    """Each side's best plain, best drafting and best cell, ours beside each peer's, for one batch size and weights.

    A side that cannot draft there is compared by its plain cell in the last. ``ours_to_this`` is the median over the
    rounds of both cells of our speed through theirs.
    """
    rows = []
    sides = list(dict.fromkeys(cell.who for cell in cells))
    for kind in (PLAIN, DRAFTING, ANY):
        found = [best_of(_of(cells, who, kind), answers) for who in sides]
        best = [cell for cell in found if cell is not None]
        ours = next((cell for cell in best if cell.who == OURS), None)
        fastest = next(iter(_fastest([cell for cell in best if cell.who != OURS], answers)), None)
        rows += [_best_row(cell, kind, ours, answers, cell == fastest) for cell in best]
    return rows


def _best_row(cell: Cell, kind: str, ours: Cell | None, answers: Answers, is_fastest: bool) -> Row:
    is_peer = ours is not None and cell != ours
    ratios = round_ratios(answers[ours], answers[cell]) if ours is not None and is_peer else []
    return Row(
        case={**_case(cell), "best_of": kind},
        figures={
            "tokens_per_s": statistics.median(speeds(answers[cell]).values()),
            "ours_to_this": statistics.median(ratios) if ratios else None,
            "ratio_least": min(ratios, default=None), "ratio_most": max(ratios, default=None),
            "num_ratios": len(ratios), "is_fastest_peer": is_fastest,
        },
    )  # fmt: skip


def reference_of(answers: Answers, batch: int) -> list[list[int]] | None:
    """Plain float32 answers that others are compared with."""
    for who in ("transformers", OURS):
        cell = Cell(who=who, weights="float32", batch=batch)
        for answer in answers.get(cell, {}).values():
            if "outputs" in answer:
                outputs: list[list[int]] = answer["outputs"]
                return outputs
    return None


def row_of_cell(
    cell: Cell, answers: Mapping[int, Answer], reference: list[list[int]] | None
) -> Row:
    """Median speed over the rounds, or the reason why there is none."""
    found = list(speeds(answers).values())
    if not found:
        reason = next(iter(answers.values()))["reason"]
        return Row(case=_case(cell), figures={"tokens_per_s": None, "reason": reason})
    outputs = next(answer["outputs"] for answer in answers.values() if "outputs" in answer)
    return Row(
        case=_case(cell),
        figures={
            "tokens_per_s": statistics.median(found), "least": min(found), "most": max(found), "rounds": len(found),
            "same_tokens": None if reference is None else same_share(outputs, reference), "reason": None,
        },
    )  # fmt: skip


def same_share(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of tokens up to each answer's first difference."""
    same = total = 0
    for ours, theirs in zip(outputs, reference, strict=True):
        total += len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            if one != other:
                break
            same += 1
    return same / total


def _case(cell: Cell) -> dict[str, str | int]:
    return {"who": cell.who, "way": cell.way, "weights": cell.weights, "batch": cell.batch}


def _of(cells: Iterable[Cell], who: str, kind: str) -> list[Cell]:
    return [cell for cell in cells if cell.who == who and kind in (cell.kind, ANY)]


def _fastest(cells: Iterable[Cell], answers: Answers) -> list[Cell]:
    """The cells that were answered, fastest first by their medians."""
    medians = {
        cell: statistics.median(found.values())
        for cell in cells
        if (found := speeds(answers.get(cell, {})))
    }
    return sorted(medians, key=lambda cell: -medians[cell])
