"""Settings of a server, checked once at start-up.

Pure values; where they come from (file, flags) is the business of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from outrider.runtime.core.breaker import BreakerConfig
from outrider.runtime.core.drafting import (
    AUTO,
    AUTO_DRAFTERS,
    DraftingConfig,
    HistoryScope,
)
from outrider.runtime.core.errors import ConfigError

# A day; whoever wants more wants no limit, which these do not have.
MOST_SECONDS = 86_400.0
# Counts are 32 bits wide on the wire.
MOST_COUNT = (1 << 31) - 1
# More than any machine has.
MOST_BYTES = 1 << 50
PREFIX_CACHE_BYTES = 512 << 20
"""Of a server that is told nothing else."""
_COUNTS = (
    "max_running", "max_queued", "max_queued_tokens", "default_gamma", "prefill_chunk", "read_tokens",
    "max_unsent_chunks",
    "num_threads", "max_connections",
)  # fmt: skip
SAMPLERS = ("auto", "host", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How much a server takes on and how it drafts.

    Attributes:
        max_running: requests that may hold a slot at once; the engine's slots bound it too.
        max_queued: requests that may wait for a slot.
        max_queued_tokens: prompt tokens of all waiting requests together.
        max_connections: connections of clients at once; a further one is closed.
        queue_timeout_s: seconds a request may wait for a slot.
        default_gamma: draft tokens per step where a request does not say; None lets the controller
            choose them by what they are expected to gain.
        block_verification: whether sampled drafts of max_accept requests that do not say are
            judged as whole blocks.
        default_drafter: registry name of the drafter where a request does not say; "model" without
            a draft in the bundle means "none"; "auto" chooses per request by measured speed.
        auto_drafters: names that "auto" chooses among, the favourite first; those without what they
            need in the bundle are left out.
        drafting: settings of the drafters themselves.
        breaker: how patient to be with drafters that fail.
        prefill_chunk: prompt tokens fed in one step, to one row or to several together; running
            streams wait at most this much per step. The engine's ``max_extend`` bounds it too.
        read_tokens: source tokens read in one step, padding included, to one row or to several together; one source is
            always read whole, and running streams wait for it.
        drain_timeout_s: seconds running requests get to finish when the server shuts down.
        hang_s: seconds after which a step that has not ended may be taken for hung; it is where it takes twenty times
            its usual time, too.
        lb_delay_s: seconds between "not ready" and refusing, for load balancers to notice.
        message_interval_s: seconds between two messages of one stream: tokens decoded meanwhile travel
            together, unless steps take more than half of it. The first message and the last never
            wait, and the second may wait half as long, or half as long again.
        max_unsent_chunks: chunks of one stream waiting to be read before it is cut off.
        stall_timeout_s: seconds one response may wait to be read before the request is cut off.
        retry_after_s: seconds a refused caller is told to wait.
        num_threads: threads of a CPU backend.
        sampler: where drafts are judged: "host", "device" (whole rounds stay on the engines'
            device), or "auto": the device, where it is an accelerator.
        prefix_cache_bytes: memory of the caches of earlier texts, kept for requests that begin alike; 0 keeps none.
        prefix_cache_scope: whose; REQUEST is refused.
        provider_options: of ONNX Runtime's CUDA provider, keys and values as it documents them, for
            example ("enable_cuda_graph", "1").
    """

    max_running: int = 64
    max_queued: int = 256
    max_queued_tokens: int = 262_144
    max_connections: int = 512
    queue_timeout_s: float = 30.0
    default_gamma: int | None = None
    block_verification: bool = False
    default_drafter: str = "model"
    auto_drafters: tuple[str, ...] = AUTO_DRAFTERS
    prefill_chunk: int = 256
    read_tokens: int = 512
    drain_timeout_s: float = 30.0
    hang_s: float = 10.0
    lb_delay_s: float = 5.0
    message_interval_s: float = 0.05
    max_unsent_chunks: int = 2048
    stall_timeout_s: float = 30.0
    retry_after_s: float = 1.0
    num_threads: int = 2
    sampler: str = "auto"
    prefix_cache_bytes: int = 0
    prefix_cache_scope: HistoryScope = HistoryScope.TENANT
    provider_options: tuple[tuple[str, str], ...] = ()
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for a setting out of range, with its key and its rule."""
        for key in (
            "max_running", "max_connections", "prefill_chunk", "read_tokens", "max_unsent_chunks",
            "num_threads",
        ):  # fmt: skip
            _check(getattr(self, key) >= 1, key, "must be at least 1")
        for key in ("max_queued", "max_queued_tokens", "default_gamma"):
            value = getattr(self, key)
            _check(value is None or value >= 0, key, "must be at least 0")
        for key in (one.name for one in fields(self) if one.name.endswith("_s")):
            _check(getattr(self, key) >= 0.0, key, "must be at least 0 seconds")
        _check(self.stall_timeout_s > 0.0, "stall_timeout_s", "must be above 0 seconds")
        # A queue may be without a limit; the others are waited for.
        for key in (
            "drain_timeout_s",
            "lb_delay_s",
            "message_interval_s",
            "retry_after_s",
            "stall_timeout_s",
        ):
            _check(getattr(self, key) <= MOST_SECONDS, key, f"must be at most {MOST_SECONDS:.0f}")
        for key in _COUNTS:
            value = getattr(self, key)
            _check(value is None or value <= MOST_COUNT, key, f"must be at most {MOST_COUNT}")
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
