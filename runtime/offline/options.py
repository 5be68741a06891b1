"""What is to be analysed, checked as far as that can be done without the bundle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.core.drafting import DraftingConfig, HistoryScope, check_drafter
from runtime.core.errors import ConfigError, RequestError

SERVED_ROWS = 64
"""Slots of ``outrider serve``: so many, and its measured step costs are used here too."""
QUICK_PROMPTS = 4
QUICK_TOKENS = 32
DEFAULT_DRAFTERS = ("model", "bigram", "unigram", "lookup")
"""Those of the paper, and prompt lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """What is analysed; checked against the bundle when it is opened.

    Attributes:
        drafters: names; of the default ones those that the bundle offers.
        gammas: draft tokens per step to measure; beyond the bundle's cap they are left out.
        temperatures: 0 is greedy.
        leniences: l in (0, 1].
        max_tokens: of every answer.
        batch: requests that decode together.
        rounds: runs of every setting; medians are reported.
        num_threads: of a CPU backend.
        device: as of ``outrider serve``.
        costs_folder: where measured step costs are kept; None for where the server keeps them.
        refreshes_costs: whether step costs are measured even if they are known.
        counts_processor: whether seconds are those of processors, not of the wall: what others do
            on the machine then hardly matters, but waiting costs nothing and two threads count
            twice. Such step costs are never kept for a server.
        datastore: corpus for drafters that need one; empty for none.
        max_prompts: the first so many; None for all.
    """

    drafters: tuple[str, ...] = ()
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    leniences: tuple[float, ...] = (1.0, 0.5, 0.3, 0.1)
    max_tokens: int = 96
    batch: int = 1
    rounds: int = 3
    num_threads: int = 2
    device: str = "cpu"
    costs_folder: Path | None = None
    refreshes_costs: bool = False
    counts_processor: bool = False
    datastore: str = ""
    max_prompts: int | None = None

    def __post_init__(self) -> None:
        """Check what does not need the bundle.

        Raises:
            ConfigError: names the option and the rule.
        """
        for key in ("max_tokens", "batch", "rounds"):
            check_option(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("gammas", "temperatures", "leniences"):
            values = getattr(self, key)
            check_option(
                bool(values) and len(set(values)) == len(values), key, "must be distinct values"
            )
        check_option(min(self.gammas) >= 1, "gammas", "must be at least 1")
        check_option(
            all(0.0 <= t <= 2.0 for t in self.temperatures), "temperatures", "must be in [0, 2]"
        )
        check_option(
            all(0.0 < one <= 1.0 for one in self.leniences), "leniences", "must be in (0, 1]"
        )

    def quick(self) -> AnalysisOptions:
        """The same over few prompts, short answers and one round."""
        return replace(
            self,
            max_prompts=QUICK_PROMPTS,
            max_tokens=min(self.max_tokens, QUICK_TOKENS),
            rounds=1,
        )


def request_drafting(datastore: str) -> DraftingConfig:
    """Settings of drafters under measurement: no request learns from another."""
    return DraftingConfig(history_scope=HistoryScope.REQUEST, datastore=datastore)


def seconds_of(counts_processor: bool) -> str:
    """Which seconds were counted, in a word."""
    return "processor" if counts_processor else "wall"


def chosen_drafters(
    names: tuple[str, ...],
    drafters: Collection[str],
    guessers: Collection[str],
    *,
    default: tuple[str, ...] = DEFAULT_DRAFTERS,
) -> tuple[str, ...]:
    """The drafters asked for, or those of the default ones that there are.

    Raises:
        ConfigError: one that this bundle does not have.
    """
    for name in names:
        check_option(name != "none", "drafters", "none: is what the others are measured against")
        try:
            check_drafter(name, drafters, guessers)
        except RequestError as error:
            raise ConfigError("drafters", f"{name}: {error.rule}") from error
    return names or tuple(name for name in default if name in drafters)


def check_option(holds: bool, key: str, rule: str) -> None:
    """Refuse an option that breaks its rule.

    Raises:
        ConfigError: it does.
    """
    if not holds:
        raise ConfigError(key, rule)
