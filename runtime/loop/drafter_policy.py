"""Which drafter a request gets: what it asked for, what there is, and what works at present."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.core.config import BreakerConfig, ServerConfig
from outrider.runtime.core.drafting import AUTO, check_drafter
from outrider.runtime.core.errors import ConfigError, RequestError
from outrider.runtime.core.events import SpeculationDisabledReason
from outrider.runtime.core.lifecycle import State
from outrider.runtime.core.params import RequestSpec, SpeculationParams
from outrider.runtime.core.request import Request, Speculation
from outrider.runtime.drafters.bandit import DrafterChoice
from outrider.runtime.drafters.base import ChecksParams
from outrider.runtime.drafters.compose import NONE
from outrider.runtime.drafters.registry import DRAFTER_NAMES, Drafters

UNDRAFTED = Speculation(drafter=NONE, gamma=0, off_reason=SpeculationDisabledReason.DISABLED)
"""How a request is decoded plainly because it asks for that, or is a beam search."""
FIXED_GAMMA = 4
"""Draft tokens per step where nobody says and nothing is chosen."""


class Breaker:
    """Counts failures in a row of one drafter; a success is the end of it.

    After a pause the next attempt is a trial: should it fail, a pause twice as long begins.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._num_failures = 0
        self._paused_until: float | None = None

    def is_paused(self, now: float) -> bool:
        """Whether the drafter is to be left alone now, ``now`` in seconds."""
        return self._paused_until is not None and now < self._paused_until

    def fail(self, now: float) -> None:
        """Count a failure at ``now``, and begin a pause where it is one too many."""
        self._num_failures += 1
        num_doublings = self._num_failures - self._config.max_failures
        if num_doublings < 0:
            return
        # The exponent is bounded so that years of failures overflow nothing.
        pause_s = self._config.first_pause_s * 2.0 ** min(num_doublings, 64)
        self._paused_until = now + min(pause_s, self._config.longest_pause_s)


class SpeculationPolicy:
    """Resolves what requests ask for, and pauses drafters that keep failing.

    Args:
        drafters: those of this server.
        config: defaults, and the patience with failures.
        max_gamma: draft tokens of one row in one step.
        can_adapt: whether gamma can be chosen step by step.
        judges_blocks: whether whole blocks cost nothing more: on the host. Requests that ask get them everywhere.
        elapsed: what requests are timed by where a drafter is chosen for them, only ever growing.

    Attributes:
        breakers: of the drafters that failed last time they were asked, by name; of a chain of fallbacks each part has
            its own, whatever chains and caps it was asked under.
        has_chosen: whether a drafter was ever chosen for a request.

    Raises:
        ConfigError: a drafter of the configuration is not one this server could ever have.
    """

    def __init__(
        self,
        drafters: Drafters,
        config: ServerConfig,
        max_gamma: int,
        *,
        can_adapt: bool = False,
        judges_blocks: bool = True,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.default_drafter != AUTO:
            _check_known("default_drafter", config.default_drafter, drafters)
        for name in config.auto_drafters:
            _check_known("auto_drafters", name, drafters)
        self._drafters = drafters
        self._config = config
        self._max_gamma = max_gamma
        self._can_adapt = can_adapt
        self._judges_blocks = judges_blocks and config.block_verification
        self.breakers: dict[str, Breaker] = {}
        self.has_chosen = False
        self._elapsed = elapsed
        usable = [drafters.usable(name) for name in config.auto_drafters]
        # In their order, each once: without a draft model several may be the same.
        known = dict.fromkeys(name for name in usable if name is not None)
        self._choice = DrafterChoice(tuple(known) or config.auto_drafters[:1])
        default = self.resolve(SpeculationParams())
        for name in {default.drafter, *known} if default.gamma else ():
            try:
                self._check(SpeculationParams(), name, default.gamma)
            except RequestError as error:
                field = error.field.replace("speculation.window", "speculation.draft_window")
                raise ConfigError(field.replace("speculation", "drafting"), error.rule) from error
        # By internal id: where the clock stood when a request with a chosen drafter began to decode.
        self._began: dict[str, float] = {}

    def resolve_request(self, spec: RequestSpec) -> Speculation:
        """Return how a request is drafted for, by a drafter chosen where "auto" is asked for; ``ended`` must follow.

        Raises:
            RequestError: its drafter has no room for what it asks.
        """
        if spec.beams is not None:
            return UNDRAFTED
        wanted = spec.speculation
        speculation = self.resolve(wanted)
        self._check(wanted, speculation.drafter, speculation.gamma)
        if (wanted.drafter or self._config.default_drafter) != AUTO or speculation.gamma == 0:
            return speculation
        if wanted.drafter is None and wanted.gamma is not None:
            # Its answer is to be the same another time, whatever was fast before.
            return speculation
        self.has_chosen = True
        name = self._choice.choose(_kind(spec, speculation))
        return replace(
            speculation,
            drafter=name,
            chosen=name,
            verifies_block=self._verifies_block(wanted, name),
            num_behind=self._num_behind(wanted, name),
        )

    def resolve(self, wanted: SpeculationParams) -> Speculation:
        """Return how a request is drafted for; callable from any thread."""
        drafter = wanted.drafter or self._config.default_drafter
        drafter = self._choice.names[0] if drafter == AUTO else drafter
        gamma = self._config.default_gamma if wanted.gamma is None else wanted.gamma
        is_adaptive = gamma is None if wanted.is_adaptive is None else wanted.is_adaptive
        is_adaptive = is_adaptive and self._can_adapt
        fixed_gamma = min(FIXED_GAMMA if gamma is None else gamma, self._max_gamma)
        gamma = self._max_gamma if gamma is None and is_adaptive else fixed_gamma
        usable = self._drafters.usable(drafter)
        if not wanted.is_enabled or usable == NONE or gamma == 0:
            return UNDRAFTED
        if usable is None:
            return Speculation(drafter=NONE, gamma=0, off_reason=SpeculationDisabledReason.NO_DRAFT)
        return Speculation(
            drafter=usable,
            gamma=gamma,
            off_reason=None,
            is_adaptive=is_adaptive,
            verifies_block=self._verifies_block(wanted, usable),
            fixed_gamma=fixed_gamma,
            num_behind=self._num_behind(wanted, usable),
        )

    def takes(self, wanted: SpeculationParams) -> bool:
        """Return whether a request's drafter has room for what it asks; callable from any thread."""
        found = self.resolve(wanted)
        try:
            self._check(wanted, found.drafter, found.gamma)
        except RequestError:
            return False
        return True

    def _check(self, wanted: SpeculationParams, drafter: str, gamma: int) -> None:
        for member in self._drafters.members(drafter) if gamma else ():
            if isinstance(member, ChecksParams):
                member.check(wanted, gamma)

    def _num_behind(self, wanted: SpeculationParams, drafter: str) -> int:
        """Return the tokens of a phrase behind a request's drafts; 0 where its drafter or the request has none."""
        drafting = self._config.drafting
        count = drafting.num_phrases if wanted.num_phrases is None else wanted.num_phrases
        is_longer = count > 0 and self._drafters.capabilities(drafter).lengthens
        return (wanted.phrase_length or drafting.phrase_length) if is_longer else 0

    def _verifies_block(self, wanted: SpeculationParams, drafter: str) -> bool:
        """Return whether a request's drafts are judged as blocks; sampled trees are only where it asks for chains."""
        is_on = wanted.verifies_block
        if is_on is None:
            each = [member.capabilities for member in self._drafters.members(drafter)]
            has_trees = any(one.is_sampled and one.proposes_trees for one in each)
            is_on = self._judges_blocks and not has_trees
        return is_on and wanted.mode is ExactnessMode.MAX_ACCEPT

    @property
    def speeds(self) -> Mapping[str, float]:
        """Tokens per unit of time, of the drafters that were chosen; callable from any thread."""
        return self._choice.speeds()

    def begin(self, live: Sequence[Request]) -> None:
        """Time the requests with a chosen drafter from their first step on that decodes."""
        for request in live:
            if request.speculation.chosen and request.state is State.DECODING:
                self._began.setdefault(request.spec.internal_id, self._elapsed())

    def ended(self, request: Request) -> None:
        """Learn how fast a request went, if its drafter was chosen; well or not, it has ended."""
        if not (chosen := request.speculation.chosen):
            return
        now = self._elapsed()
        began = self._began.pop(request.spec.internal_id, now)
        # One that went on without its drafter tells nothing of it.
        tokens = 0 if request.speculation.drafter != chosen else request.sequence.num_output
        kind = _kind(request.spec, request.speculation)
        self._choice.note(kind, chosen, tokens=tokens, elapsed=now - began)

    def pause(self, live: Sequence[Request], now: float) -> None:
        """Have rows whose drafter is paused at ``now`` go on without it."""
        paused = {name for name, breaker in self.breakers.items() if breaker.is_paused(now)}
        for request in live if paused else ():
            name = request.speculation.drafter
            if request.speculation.gamma and (left := self._drafters.without(name, paused)) != name:
                request.degrade(left, reason=SpeculationDisabledReason.DRAFTER_PAUSED)

    def note(self, asked: Mapping[str, Exception | None], now: float) -> None:
        """Count what the drafters asked in a step raised; None where one worked."""
        for name, error in asked.items():
            if error is not None:
                breaker = self.breakers.setdefault(name, Breaker(self._config.breaker))
                breaker.fail(now)
            elif name in self.breakers:
                del self.breakers[name]


def _kind(spec: RequestSpec, speculation: Speculation) -> Hashable:
    """Return what tells requests apart that a drafter serves differently well; it never changes for a request."""
    return (spec.params.is_greedy, spec.speculation.mode, speculation.fixed_gamma)


def _check_known(key: str, name: str, drafters: Drafters) -> None:
    """Refuse an unknown name; a bundle without a draft model may keep one that needs it.

    Raises:
        ConfigError: the name is not one this server could ever have.
    """
    try:
        known = tuple(dict.fromkeys((*DRAFTER_NAMES, *drafters)))
        check_drafter(name, known, known)
    except RequestError as error:
        raise ConfigError(key, f"{name}: {error.rule}") from error
