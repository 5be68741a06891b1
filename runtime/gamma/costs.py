"""What steps cost on one machine, in seconds: a value that pure code takes as an argument.

``runtime.calibration.calibrate`` measures it. Times of a model are a grid over rows and tokens, made monotone
(more rows, tokens or capacity never cost less), interpolated inside and continued with the last
slope outside. What the host does beside the engines (sampling included) is linear in rows and draft
tokens, by the kind of law that is sampled.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
MOST_DISAGREEMENT = 0.1
"""Share by which two measurements of a settled table's calls may differ."""


class RowKind(StrEnum):
    """Laws that cost the sampler alike.

    GREEDY: an argmax per token. SAMPLED: probability rows of draft and target. STABLE: a race under
    noise per token of the vocabulary.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"
    STABLE = "stable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Seconds of one extend of one model.

    Attributes:
        batches: ascending rows that were measured.
        tokens: ascending tokens per row that were measured.
        seconds: [len(batches)][len(tokens)] at ``capacity``; monotone along both axes.
        capacity: cache positions per row at which the grid was measured.
        position_s: seconds per row and cache position beyond ``capacity``.
    """

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    capacity: int
    position_s: float

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            ValueError: names the field and the rule.
        """
        for name, axis in (("batches", self.batches), ("tokens", self.tokens)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 1:
                raise ValueError(f"{name}: must ascend from at least 1")
        grid = np.asarray(self.seconds, dtype=np.float64)
        if grid.shape != (len(self.batches), len(self.tokens)):
            raise ValueError("seconds: must have one row per batch and one column per tokens")
        if not (np.isfinite(grid).all() and (grid > 0.0).all()):
            raise ValueError("seconds: must be finite and positive")
        if (np.diff(grid, axis=0) < 0.0).any() or (np.diff(grid, axis=1) < 0.0).any():
            raise ValueError("seconds: must not fall along either axis")
        if not 0.0 <= self.position_s < np.inf:
            raise ValueError("position_s: must be finite and at least 0")

    def extend_s(self, batch: int, tokens: int, capacity: int) -> float:
        """Seconds of one extend of ``batch`` rows by ``tokens`` each."""
        columns = [_interpolate(self.tokens, row, tokens) for row in self.seconds]
        grown = max(0, capacity - self.capacity) * self.position_s * batch
        return _interpolate(self.batches, columns, batch) + grown


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Seconds the host spends per row of one kind.

    Attributes:
        row_s: per row of a step, whatever is drafted.
        token_s: per draft token, proposed and judged.
    """

    row_s: float
    token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of a step outside the engines, sampling included.

    Attributes:
        step_s: per step.
        call_s: per draft call of a step.
        rows: by kind.
    """

    step_s: float
    call_s: float
    rows: Mapping[RowKind, RowCosts]

    def __post_init__(self) -> None:
        """Check that every kind is there and nothing is negative.

        Raises:
            ValueError: names the field and the rule.
        """
        if set(self.rows) != set(RowKind):
            raise ValueError("rows: must have every kind")
        times = [self.step_s, self.call_s]
        times += [t for row in self.rows.values() for t in (row.row_s, row.token_s)]
        if not all(0.0 <= one < np.inf for one in times):
            raise ValueError("host: must be finite and at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Everything a choice of gamma needs to know of a machine.

    Attributes:
        target: the target model.
        draft: the draft model; None without one.
        catch_up: the draft model on one row and long spans; None without one.
        host: the rest of a step.
        trees: the target over trees, by tokens of the widest row; None where it takes none.
        capacities: ascending cache sizes that the engines take, positions per row.
        disagreement: how far apart two measurements of the same calls were, as a share, a slower
            machine during one of them aside.
    """

    target: ModelCosts
    draft: ModelCosts | None
    catch_up: ModelCosts | None
    host: HostCosts
    capacities: tuple[int, ...]
    disagreement: float = 0.0
    trees: ModelCosts | None = None

    @property
    def is_settled(self) -> bool:
        """Whether its measurements agreed well enough to be kept."""
        return self.disagreement <= MOST_DISAGREEMENT

    def capacity_for(self, num_tokens: int) -> int:
        """The cache size in use once ``num_tokens`` of one row were cached."""
        return self.capacities[
            min(bisect_left(self.capacities, num_tokens), len(self.capacities) - 1)
        ]

    def node_cost(self, num_nodes: int, num_rows: int = 1) -> float:
        """What each token of trees of ``num_nodes``, one per row, adds to a plain step, in plain steps.

        A node is worth its place where it is kept more often than that: then it yields more tokens
        per second than plain decoding of as many rows.
        """
        capacity = self.capacities[0]
        plain_s = self.target.extend_s(num_rows, 1, capacity)
        tree_s = (self.trees or self.target).extend_s(num_rows, 1 + num_nodes, capacity)
        return max(0.0, tree_s - plain_s) / num_nodes / (plain_s + self.host.step_s)

    def to_json(self) -> str:
        """The table as JSON; ``from_json`` gives it back exactly."""
        content = {
            "target": _model_fields(self.target),
            "draft": None if self.draft is None else _model_fields(self.draft),
            "catch_up": None if self.catch_up is None else _model_fields(self.catch_up),
            "trees": None if self.trees is None else _model_fields(self.trees),
            "host": {
                "step_s": self.host.step_s,
                "call_s": self.host.call_s,
                "rows": {
                    kind.value: {"row_s": row.row_s, "token_s": row.token_s}
                    for kind, row in self.host.rows.items()
                },
            },
            "capacities": self.capacities,
            "disagreement": self.disagreement,
        }
        return json.dumps(content, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The table that ``to_json`` wrote.

        Raises:
            ValueError: the text is not such a table.
        """
        try:
            content = json.loads(text)
            host = content["host"]
            rows = {RowKind(kind): RowCosts(**row) for kind, row in host["rows"].items()}
            return cls(
                target=_model_from(content["target"]),
                draft=_model_from(content["draft"]) if content["draft"] else None,
                catch_up=_model_from(content["catch_up"]) if content["catch_up"] else None,
                trees=_model_from(content["trees"]) if content["trees"] else None,
                host=HostCosts(step_s=host["step_s"], call_s=host["call_s"], rows=rows),
                capacities=tuple(content["capacities"]),
                disagreement=float(content["disagreement"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost table: {error!r}") from error


def monotone(measured: Seconds) -> Seconds:
    """A grid near the measured one that falls along neither axis.

    The middle between the least monotone grid above and the greatest one below; a grid that is
    monotone already is left as it is.

    Args:
        measured: [B, T] or [T] float64 seconds.
    """
    above, below = measured, measured
    for axis in range(measured.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return (above + below) / 2.0


def proportional(measured: Seconds, batches: Sequence[int], tokens: Sequence[int]) -> Seconds:
    """A grid in which nothing costs more per row and token than something smaller does.

    Larger calls only ever share what calls cost anyway, and whatever disturbs a measurement adds to
    it, so that a time above that was disturbed.

    Args:
        measured: [B, T] float64 seconds.
        batches: ascending rows.
        tokens: ascending tokens per row.
    """
    sizes = np.outer(np.asarray(batches, dtype=np.float64), np.asarray(tokens, dtype=np.float64))
    per_token = measured / sizes
    for axis in range(2):
        per_token = np.minimum.accumulate(per_token, axis=axis)
    fitted: Seconds = per_token * sizes
    return fitted


def fit_host(samples: Sequence[tuple[RowKind, int, int, float]]) -> HostCosts:
    """Least squares with coefficients that are not negative, relative to what was measured.

    Args:
        samples: kind, rows, draft tokens per row and seconds of a step outside the engines; every
            kind with at least two numbers of rows and two of draft tokens.
    """
    kinds = list(RowKind)
    design = np.zeros((len(samples), 2 + 2 * len(kinds)))
    measured = np.array([seconds for *_, seconds in samples])
    for index, (kind, rows, gamma, _) in enumerate(samples):
        place = 2 + 2 * kinds.index(kind)
        design[index, [0, 1, place, place + 1]] = 1.0, gamma, rows, rows * gamma
    # A percent of a short step counts as much as a percent of a long one.
    scaled = design / measured[:, None]
    fitted = np.zeros(design.shape[1])
    kept = np.arange(design.shape[1])
    while len(kept):
        solution = np.linalg.lstsq(scaled[:, kept], np.ones(len(samples)), rcond=None)[0]
        if (solution >= 0.0).all():
            fitted[kept] = solution
            break
        kept = kept[solution >= 0.0]
    rows_of = {
        kind: RowCosts(row_s=float(fitted[2 + 2 * i]), token_s=float(fitted[3 + 2 * i]))
        for i, kind in enumerate(kinds)
    }
    return HostCosts(step_s=float(fitted[0]), call_s=float(fitted[1]), rows=rows_of)


def _interpolate(axis: Sequence[int], values: Sequence[float], at: int) -> float:
    """Piecewise linear; constant below the axis, the last slope beyond it."""
    if at <= axis[0]:
        return values[0]
    if len(axis) == 1:
        return values[0] * at / axis[0]
    after = min(bisect_left(axis, at), len(axis) - 1)
    before = after - 1
    slope = (values[after] - values[before]) / (axis[after] - axis[before])
    return values[before] + slope * (at - axis[before])


def _model_fields(costs: ModelCosts) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in ModelCosts.__slots__}


def _model_from(content: dict[str, Any]) -> ModelCosts:
    return ModelCosts(
        batches=tuple(content["batches"]),
        tokens=tuple(content["tokens"]),
        seconds=tuple(tuple(row) for row in content["seconds"]),
        capacity=content["capacity"],
        position_s=content["position_s"],
    )
