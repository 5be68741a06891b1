"""Options of ``outrider analyze``, and those it shares with ``tune``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

from outrider.engines.bundle.manifest import Manifest
from outrider.runtime.core.drafting import DraftingConfig, HistoryScope, check_drafter
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.offline.prompts import Prompts, encode_prompts, read_prompts
from outrider.runtime.offline.rig import Rig, RigOptions, open_rig

SERVED_ROWS = 64
"""Slots of ``outrider serve``: so many, and its measured step costs are used here too."""
QUICK_PROMPTS = 4
QUICK_TOKENS = 32
DEFAULT_DRAFTERS = ("model", "lookup", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of every measurement over prompts.

    Attributes:
        drafters: names; empty for the default ones that the bundle has.
        gammas: draft tokens per step to measure; those beyond the bundle's cap are left out.
        max_tokens: of every answer.
        batch: requests that decode together.
        rounds: runs of every setting; medians are reported.
        max_prompts: number of prompts used, from the first; None for all.
        rig: how the bundle is opened.
    """

    drafters: tuple[str, ...] = ()
    gammas: tuple[int, ...] = (1, 2, 4, 8)
    max_tokens: int = 96
    batch: int = 1
    rounds: int = 3
    max_prompts: int | None = None
    rig: RigOptions = field(default_factory=RigOptions)

    def __post_init__(self) -> None:
        """Raise ConfigError for an option that breaks its rule, as far as no bundle is needed."""
        for key, least in {"max_tokens": 2, "batch": 1, "rounds": 1}.items():
            # An answer of one token comes with its prompt: no pass of the target could be counted.
            check_option(getattr(self, key) >= least, key, f"must be at least {least}")
        check_distinct("gammas", self.gammas)
        check_option(min(self.gammas) >= 1, "gammas", "must be at least 1")

    def quick(self) -> Self:
        """Return the same options over few prompts, with short answers and one round."""
        length = min(self.max_tokens, QUICK_TOKENS)
        return replace(self, max_prompts=QUICK_PROMPTS, max_tokens=length, rounds=1)

    def open_rig(self, bundle: Path) -> Rig:
        """Open the bundle with enough slots and with known step costs."""
        rig = replace(
            self.rig,
            max_batch=max(SERVED_ROWS, self.batch),
            knows_costs=True,
            drafting=self.drafting(),
        )
        return open_rig(bundle, rig)

    def drafting(self) -> DraftingConfig:
        """Return the drafters' settings, changed so that no request learns from another."""
        return replace(self.rig.drafting, history_scope=HistoryScope.REQUEST)

    def fitted(self, manifest: Manifest) -> Self:
        """Return the same options without gammas beyond the bundle's cap.

        Raises:
            ConfigError: no gamma is left, or the batch is larger than the bundle's.
        """
        gammas = tuple(gamma for gamma in self.gammas if gamma <= manifest.max_gamma)
        check_option(bool(gammas), "gammas", f"must include one of 1..{manifest.max_gamma}")
        fits = self.batch <= manifest.max_batch
        check_option(fits, "batch", f"must be at most {manifest.max_batch}")
        return replace(self, gammas=gammas)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions(MeasureOptions):
    """Options of an analysis; temperature 0 is greedy, leniences are in (0, 1]."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    leniences: tuple[float, ...] = (1.0, 0.5, 0.3, 0.1)

    def __post_init__(self) -> None:
        """Raise ConfigError for an option that breaks its rule, as far as no bundle is needed."""
        MeasureOptions.__post_init__(self)
        for key in ("temperatures", "leniences"):
            check_distinct(key, getattr(self, key))
        check_option(
            all(0.0 <= t <= 2.0 for t in self.temperatures), "temperatures", "must be in [0, 2]"
        )
        check_option(
            all(0.0 < one <= 1.0 for one in self.leniences), "leniences", "must be in (0, 1]"
        )


Options = TypeVar("Options", bound=MeasureOptions)


@contextmanager
def opened(bundle: Path, prompts: Path, options: Options) -> Iterator[tuple[Rig, Prompts, Options]]:
    """Open a bundle and the prompts of a file while the block runs, with the options that fit the bundle.

    Raises:
        BundleError: the bundle does not fit its manifest.
        ConfigError: an option or a prompt does not fit the bundle, or the device cannot be used.
    """
    texts = read_prompts(prompts)[: options.max_prompts]
    with closing(options.open_rig(bundle)) as rig:
        fitted = options.fitted(rig.bundle.manifest)
        manifest = rig.bundle.manifest
        encoded = encode_prompts(
            texts, rig.tokenizer, max_tokens=fitted.max_tokens, manifest=manifest
        )
        yield rig, encoded, fitted


def seconds_of(counts_processor: bool) -> str:
    """Return the word for the seconds that were counted."""
    return "processor" if counts_processor else "wall"


def chosen_drafters(
    names: tuple[str, ...],
    drafters: Collection[str],
    guessers: Collection[str],
    *,
    default: tuple[str, ...] = DEFAULT_DRAFTERS,
) -> tuple[str, ...]:
    """Return the named drafters, or the default ones that the bundle has.

    Raises:
        ConfigError: the bundle does not have one of the names.
    """
    for name in names:
        check_option(name != "none", "drafters", "none: is what the others are measured against")
        try:
            check_drafter(name, drafters, guessers)
        except RequestError as error:
            raise ConfigError("drafters", f"{name}: {error.rule}") from error
    return names or tuple(name for name in default if name in drafters)


def check_option(holds: bool, key: str, rule: str) -> None:
    """Raise ConfigError unless an option holds its rule."""
    if not holds:
        raise ConfigError(key, rule)


def check_distinct(key: str, values: Collection[float]) -> None:
    """Raise ConfigError for a list that is empty or repeats a value."""
    check_option(bool(values) and len(set(values)) == len(values), key, "must be distinct values")
