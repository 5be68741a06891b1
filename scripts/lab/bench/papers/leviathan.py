"""Tables and figures of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from outrider.runtime.core.params import SpeculationParams

from scripts.lab.bench.papers.common import PLAIN, Cell, Context, Table
from scripts.tools.results import Scalar

GAMMAS = (1, 2, 3, 5, 7)
TEMPERATURES = (0.0, 1.0)


def speeds(context: Context) -> Iterator[Cell]:
    """Table 4: the draft model at each gamma beside plain decoding, greedy and sampled."""
    for temperature in TEMPERATURES:
        for gamma in (0, *GAMMAS):
            wanted = SpeculationParams(drafter="model", gamma=gamma) if gamma else PLAIN
            yield Cell(
                case={"temperature": temperature, "gamma": gamma},
                measure=partial(_run, context, wanted, temperature),
            )


def _run(context: Context, wanted: SpeculationParams, temperature: float) -> dict[str, Scalar]:
    return context.run(context.open(), wanted, temperature=temperature).figures()


TABLES: dict[str, Table] = {"leviathan-4": speeds}
