"""Which drafter a request gets: what it asked for, what there is, and what works at present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engines.laws import ExactnessMode
from runtime.core.breaker import Breaker
from runtime.core.config import ServerConfig
from runtime.core.drafting import check_drafter
from runtime.core.errors import ConfigError, RequestError
from runtime.core.params import SpeculationParams
from runtime.core.request import Request, Speculation
from runtime.core.stats import DISABLED, NO_DRAFT, PAUSED
from runtime.drafters import DRAFTER_NAMES, Drafters

FIXED_GAMMA = 4
"""Draft tokens per step where nobody says and nothing is chosen."""


class SpeculationPolicy:
    """Resolves what requests ask for, and pauses drafters that keep failing.

    Args:
        drafters: those of this server.
        config: defaults, and the patience with failures.
        max_gamma: draft tokens of one row in one step.
        can_adapt: whether gamma can be chosen step by step.

    Raises:
        ConfigError: the default drafter is not one this server could ever have.
    """

    def __init__(
        self,
        drafters: Drafters,
        config: ServerConfig,
        max_gamma: int,
        *,
        can_adapt: bool = False,
    ) -> None:
        _check_default(config.default_drafter, drafters)
        self._drafters = drafters
        self._config = config
        self._max_gamma = max_gamma
        self._can_adapt = can_adapt
        self._breakers: dict[str, Breaker] = {}

    def resolve(self, wanted: SpeculationParams) -> Speculation:
        """How a request is drafted for; callable from any thread."""
        drafter = wanted.drafter or self._config.default_drafter
        gamma = self._config.default_gamma if wanted.gamma is None else wanted.gamma
        is_adaptive = gamma is None if wanted.is_adaptive is None else wanted.is_adaptive
        is_adaptive = is_adaptive and self._can_adapt
        fixed_gamma = min(FIXED_GAMMA if gamma is None else gamma, self._max_gamma)
        gamma = self._max_gamma if gamma is None and is_adaptive else fixed_gamma
        if not wanted.is_enabled or drafter == "none" or gamma == 0:
            return Speculation(drafter="none", gamma=0, off_reason=DISABLED)
        usable = self._drafters.usable(drafter)
        if usable is None:
            return Speculation(drafter="none", gamma=0, off_reason=NO_DRAFT)
        return Speculation(
            drafter=usable,
            gamma=gamma,
            off_reason=None,
            is_adaptive=is_adaptive,
            verifies_block=self._verifies_block(wanted),
            fixed_gamma=fixed_gamma,
        )

    def resolve_search(self, wanted: SpeculationParams) -> Speculation:
        """How a beam search is drafted for: by the draft model, or not at all; callable from any thread."""
        default = "none" if self._config.default_drafter == "none" else "model"
        drafter = wanted.drafter or default
        return self.resolve(
            replace(wanted, drafter=drafter, is_adaptive=False, verifies_block=False)
        )

    def _verifies_block(self, wanted: SpeculationParams) -> bool:
        asked = wanted.verifies_block
        is_on = self._config.block_verification if asked is None else asked
        return is_on and wanted.mode is ExactnessMode.MAX_ACCEPT

    def pause(self, live: Sequence[Request], now: float) -> None:
        """Have rows whose drafter is paused at ``now`` go on without it."""
        paused = {name for name, breaker in self._breakers.items() if breaker.is_paused(now)}
        for request in live if paused else ():
            while request.gamma and (name := request.speculation.drafter) in paused:
                left = self._drafters.without_model(name)
                request.degrade(None if left == name else left, reason=PAUSED)

    def note(self, asked: Mapping[str, Exception | None], now: float) -> None:
        """Count what the drafters asked in a step raised; None where one worked."""
        for name, error in asked.items():
            if error is not None:
                breaker = self._breakers.setdefault(name, Breaker(self._config.breaker))
                breaker.fail(now)
            elif name in self._breakers:
                del self._breakers[name]


def _check_default(name: str, drafters: Drafters) -> None:
    """A bundle without a draft model may keep the default that needs one.

    Raises:
        ConfigError: the name is not one this server could ever have.
    """
    try:
        known = {*drafters, *DRAFTER_NAMES}
        check_drafter(name, known, known)
    except RequestError as error:
        raise ConfigError("default_drafter", "must name a known drafter") from error
