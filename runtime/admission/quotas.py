"""Requests and tokens that tenants may use: token buckets, read from the other side.

No clock: times come in. A meter holds what was used and is not paid off yet. It runs off at the tenant's rate, and its
brim is the burst; an idle tenant's is empty and needs no memory. What is known only later, the tokens of answers, may
fill it beyond the brim; then nothing begins until enough has run off. So nobody uses more than the rate for long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.runtime.core.errors import QuotaExceeded
from outrider.runtime.core.tenant import TenantRules

MOST_RETRY_S = 3600.0
"""A tenant without any rate is told to come back after an hour."""
MANY_METERS = 2048
"""From so many on, those that have run empty are forgotten."""
SLACK = 1e-6
"""Of a request or token, which sums of rounded times may be off by."""


@dataclass(slots=True)
class Meter:
    """What was used of one quota.

    Attributes:
        rate: that runs off in a second.
        at_s: time of the last look.
    """

    rate: float
    at_s: float
    used: float = 0.0

    def look(self, rate: float, now: float) -> float:
        """Let run off what has until now, at the rate of the last look, and return what is left."""
        self.used = max(0.0, self.used - self.rate * max(0.0, now - self.at_s))
        self.rate, self.at_s = rate, max(now, self.at_s)
        return self.used


class Quotas:
    """The meters of all tenants that have quotas."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str], Meter] = {}

    def begin(self, tenant: str, rules: TenantRules, now: float) -> None:
        """Count a request.

        Raises:
            QuotaExceeded: the tenant has used up its requests or its tokens; nothing is counted.
        """
        names = [
            ("requests_per_s", rules.requests_per_s, rules.burst_requests),
            ("tokens_per_s", rules.tokens_per_s, rules.burst_tokens),
        ]
        for name, rate, burst in names:
            if rate is not None:
                self._check(tenant, name, rate, rate if burst is None else burst, now)
        if rules.requests_per_s is not None:
            self._meter(tenant, "requests_per_s", rules.requests_per_s, now).used += 1.0

    def charge(self, tenant: str, rules: TenantRules, num_tokens: int, now: float) -> None:
        """Count tokens of a prompt that was let in, or of an answer."""
        if rules.tokens_per_s is not None:
            self._meter(tenant, "tokens_per_s", rules.tokens_per_s, now).used += num_tokens

    def _check(self, tenant: str, name: str, rate: float, burst: float, now: float) -> None:
        # Whatever the burst, one fits where nothing is used.
        excess = self._meter(tenant, name, rate, now).used + 1.0 - max(1.0, burst)
        if excess > SLACK:
            wait_s = min(MOST_RETRY_S, excess / rate) if rate > 0.0 else MOST_RETRY_S
            # Rounded up, since hints are whole milliseconds.
            raise QuotaExceeded(name, math.ceil(wait_s * 1000.0) / 1000.0)

    def _meter(self, tenant: str, name: str, rate: float, now: float) -> Meter:
        """Return a meter as it stands now."""
        if (tenant, name) not in self._meters and len(self._meters) >= MANY_METERS:
            meters = self._meters.items()
            self._meters = {key: one for key, one in meters if one.look(one.rate, now) > 0.0}
        meter = self._meters.setdefault((tenant, name), Meter(rate, now))
        meter.look(rate, now)
        return meter
