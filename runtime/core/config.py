"""Settings of a server, checked once at start-up.

Pure values; where they come from (file, flags) is the business of the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.runtime.core.drafting import AUTO, AUTO_DRAFTERS, DraftingConfig, HistoryScope
from outrider.runtime.core.errors import ConfigError
from outrider.runtime.core.settings import (
    LIMITS,
    Given,
    Option,
    Panel,
    check_bounds,
    converted,
    limit,
    part,
    setting,
)

# A day; whoever wants more wants no limit, which these do not have.
MOST_SECONDS = 86_400.0
# Counts are 32 bits wide on the wire.
MOST_COUNT = (1 << 31) - 1
# More than any machine has.
MOST_BYTES = 1 << 50
PREFIX_CACHE_BYTES = 512 << 20
"""Of a server that is told nothing else."""
SAMPLERS = ("auto", "host", "device")
_COUNT, _FROM_0 = (1, MOST_COUNT), (0, MOST_COUNT)
_SECONDS, _ANY_SECONDS = (0, MOST_SECONDS), (0, math.inf)


def _parse_gamma(given: Given) -> int | None:
    text = given["gamma"]
    if not text or text == "auto":
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_COUNT)):
        raise ConfigError("gamma", f"must be auto or a number of at most {MOST_COUNT}")
    return int(text)


def _parse_pairs(given: Given) -> tuple[tuple[str, str], ...]:
    """Return keys and values of texts such as "a=b"; one without a key or "=" has an empty key."""
    parts = [text.partition("=") for text in given["provider_option"] or ()]
    return tuple((key.strip() if sign else "", value.strip()) for key, sign, value in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """How patient to be with drafters that fail.

    Attributes:
        max_failures: failures in a row after which a drafter is paused.
        first_pause_s: length of the first pause; each further failure doubles it.
        longest_pause_s: length of a pause at most.
    """

    max_failures: int = 3
    first_pause_s: float = 1.0
    longest_pause_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting out of range, with its key and its rule."""
        if self.max_failures < 1:
            raise ConfigError("max_failures", "must be at least 1")
        if not self.first_pause_s > 0.0:
            raise ConfigError("first_pause_s", "must be more than 0 seconds")
        if not self.longest_pause_s >= self.first_pause_s:
            raise ConfigError("longest_pause_s", "must be at least first_pause_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How much a server takes on and how it drafts; the help of each setting says what it is.

    Of some there is more to say:

    * ``default_gamma`` of None lets the controller choose draft tokens by what they are expected to gain.
    * ``default_drafter`` is a name of the registry; "model" means "none" without a draft in the bundle.
    * ``auto_drafters`` that lack what they need in the bundle are left out.
    * ``message_interval_s``: tokens decoded meanwhile travel together, unless steps take more than half of it. The
      first message and the last never wait; the second waits between .5 and 1.5 times as long.
    * ``sampler`` of "device" leaves whole rounds on the engines' device; "auto" does so on an accelerator.
    """

    max_running: int = setting(
        64,
        Panel.LIMITS,
        "Requests that hold a slot; the engine's slots bound them too.",
        bounds=_COUNT,
    )
    max_queued: int = setting(256, Panel.LIMITS, "Requests that wait for a slot.", bounds=_FROM_0)
    max_queued_tokens: int = limit(
        262_144, "Prompt tokens of all waiting requests together.", _FROM_0
    )
    max_connections: int = setting(
        4096,
        Panel.LIMITS,
        "Connections of clients at once; strangers leave first, a further one is closed.",
        bounds=_COUNT,
    )
    queue_timeout_s: float = setting(
        30.0, Panel.LIMITS, "Seconds that a request may wait for a slot.", bounds=_ANY_SECONDS
    )
    default_gamma: int | None = converted(
        None,
        _parse_gamma,
        _FROM_0,
        gamma=Option(
            Panel.DRAFTING,
            "Draft tokens per step, or auto: what gains most. Default: as tuned.",
            str | None,
        ),
    )
    block_verification: bool = setting(
        True,
        Panel.DRAFTING,
        "Judge sampled drafts of max_accept as whole blocks; not trees, nor rounds on a device.",
    )
    default_drafter: str = setting(
        "model",
        Panel.DRAFTING,
        "Name (see outrider info), or auto. Default: as tuned; else auto with gamma auto, and model without.",
        option="drafter",
        offered=None,
    )
    auto_drafters: tuple[str, ...] = setting(
        AUTO_DRAFTERS,
        Panel.DRAFTING,
        "Names that drafter auto chooses among by speed, favourite first.",
    )
    prefill_chunk: int = limit(
        256,
        "Prompt tokens fed in one step, to one row or to several together. The engine's ``max_extend`` bounds it too.",
        _COUNT,
    )
    shared_chunk: int = limit(
        64,
        "The same, while at least as many streams run as prompts wait; on accelerators, where wide calls cost little "
        "more than narrow ones, ``prefill_chunk`` holds there too.",
        _COUNT,
    )
    read_tokens: int = limit(
        512,
        "Source tokens read in one step, padding included, to one row or to several together; one source is always "
        "read whole, and running streams wait for it.",
        _COUNT,
    )
    drain_timeout_s: float = setting(
        30.0, Panel.LIMITS, "Seconds that running requests get at shutdown.", bounds=_SECONDS
    )
    hang_s: float = setting(
        10.0,
        Panel.LIMITS,
        "Seconds after which a step counts as hung, at 20 times its usual time; its process is ended.",
        bounds=_ANY_SECONDS,
    )
    lb_delay_s: float = setting(
        5.0,
        Panel.LIMITS,
        'Seconds between "not ready" and refusing, for load balancers to notice.',
        bounds=_SECONDS,
    )
    message_interval_s: float = setting(
        0.05,
        Panel.LIMITS,
        "Seconds between two messages of a stream, where steps are short.",
        bounds=_SECONDS,
    )
    max_unsent_chunks: int = limit(
        2048, "Chunks of one stream waiting to be read before it is cut off.", _COUNT
    )
    stall_timeout_s: float = limit(
        30.0, "Seconds one response may wait to be read before the request is cut off.", _SECONDS
    )
    retry_after_s: float = limit(1.0, "Seconds a refused caller is told to wait.", _SECONDS)
    num_threads: int = setting(
        0,
        Panel.ENGINES,
        "Threads of a CPU backend; 0: one per physical core that this process may use.",
        option="threads",
        bounds=_FROM_0,
    )
    sampler: str = setting("auto", Panel.ENGINES, "Where drafts are judged: auto, host or device.")
    prefix_cache_bytes: int = setting(
        0,
        Panel.DRAFTING,
        "Memory for caches of earlier prompts and answers; 0: none.",
        offered=PREFIX_CACHE_BYTES,
    )
    prefix_cache_scope: HistoryScope = setting(
        HistoryScope.TENANT,
        Panel.DRAFTING,
        "Whose prompts and answers a request may find: tenant or server.",
    )
    provider_options: tuple[tuple[str, str], ...] = converted(
        (),
        _parse_pairs,
        provider_option=Option(
            Panel.ENGINES,
            "KEY=VALUE for ONNX Runtime's CUDA provider, such as enable_cuda_graph=1.",
            table="provider_options",
        ),
    )
    drafting: DraftingConfig = part(
        DraftingConfig,
        "drafting",
        drafting=Option(
            Panel.DRAFTING,
            "Setting of the drafters, NAME=VALUE; repeat for several. preset=paper is Ouroboros as its paper has it.",
            table="drafting",
        ),
    )
    breaker: BreakerConfig = part(BreakerConfig, LIMITS, "breaker_")

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting out of range, with its key and its rule."""
        check_bounds(self)
        _check(self.stall_timeout_s > 0.0, "stall_timeout_s", "must be above 0 seconds")
        _check(bool(self.default_drafter), "default_drafter", "must name a drafter")
        _check(bool(self.auto_drafters), "auto_drafters", "must name a drafter")
        _check(AUTO not in self.auto_drafters, "auto_drafters", f"must not hold {AUTO} itself")
        _check(self.sampler in SAMPLERS, "sampler", f"must be one of {', '.join(SAMPLERS)}")
        size, scope = self.prefix_cache_bytes, self.prefix_cache_scope
        _check(0 <= size <= MOST_BYTES, "prefix_cache_bytes", f"must be in [0, {MOST_BYTES}]")
        is_shared = scope in (HistoryScope.TENANT, HistoryScope.SERVER)
        _check(is_shared, "prefix_cache_scope", "must be tenant or server")
        keys = [key for key, _ in self.provider_options]
        _check(all(keys), "provider_options", "must be KEY=VALUE")
        _check(len({*keys}) == len(keys), "provider_options", "must name every key once")


def _check(holds: bool, key: str, rule: str) -> None:
    if not holds:
        raise ConfigError(key, rule)
