"""What a tenant may use in a minute: requests, and tokens of prompts and answers. Pure.

Token buckets: a bucket holds one minute's worth and fills evenly. A request takes one of the
requests, and needs the bucket of tokens not to be empty; what it turns out to use is taken then,
if need be below nothing. So a tenant's rate holds over any long time, whatever `max_tokens` said;
over a short one it may be passed by what was admitted while there was something left.

Time is passed in, in seconds of one clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stanchion.core.errors import ConfigError, QuotaExceeded

MINUTE_S = 60.0


@dataclass(frozen=True)
class Quota:
    """0: no bound."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class Bucket:
    def __init__(self, per_minute: int, now: float) -> None:
        self._size = float(per_minute)
        self._left = self._size
        self._at = now

    def left(self, now: float) -> float:
        since, self._at = max(0.0, now - self._at), max(self._at, now)
        self._left = min(self._size, self._left + since * self._size / MINUTE_S)
        return self._left

    def wait_s(self, wanted: float, now: float) -> float:
        """Until so much is there; 0 if it is."""
        return max(0.0, wanted - self.left(now)) * MINUTE_S / self._size

    def take(self, amount: float, now: float) -> None:
        self._left = self.left(now) - amount


class Quotas:
    """`own` says what some tenants have instead of `default`; all others have that, each."""

    def __init__(self, default: Quota, own: Mapping[str, Quota]) -> None:
        self._default = default
        self._own = own
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def admit(self, tenant: str, now: float) -> None:
        """Take one request. Raise QuotaExceeded, which names the bound and says how long it is."""
        quota = self._quota(tenant)
        bounds = (
            ("requests_per_minute", quota.requests_per_minute),
            ("tokens_per_minute", quota.tokens_per_minute),
        )
        for name, bound in bounds:
            if bound and (wait := self._bucket(tenant, name, bound, now).wait_s(1.0, now)) > 0:
                raise QuotaExceeded(name, f"tenant {tenant} has used its {bound}", wait)
        if quota.requests_per_minute:
            bucket = self._bucket(tenant, *bounds[0], now)
            bucket.take(1.0, now)

    def used(self, tenant: str, tokens: int, now: float) -> None:
        if bound := self._quota(tenant).tokens_per_minute:
            self._bucket(tenant, "tokens_per_minute", bound, now).take(tokens, now)

    def _quota(self, tenant: str) -> Quota:
        return self._own.get(tenant, self._default)

    def _bucket(self, tenant: str, name: str, bound: int, now: float) -> Bucket:
        """Tenants are those who have keys: there are not more buckets than these."""
        found = self._buckets.get((tenant, name))
        if found is None:
            found = self._buckets[tenant, name] = Bucket(bound, now)
        return found


def own_quotas(said: Sequence[str]) -> dict[str, Quota]:
    """Of "NAME=REQUESTS:TOKENS" each. Raise ConfigError."""
    found: dict[str, Quota] = {}
    for one in said:
        name, _, bounds = one.partition("=")
        requests, _, tokens = bounds.partition(":")
        if not (name and requests.isdecimal() and tokens.isdecimal()):
            raise ConfigError(
                f"quota {one!r} must be NAME=REQUESTS:TOKENS, both a minute, 0 for no bound"
            )
        if name in found:
            raise ConfigError(f"quota: {name} has two")
        found[name] = Quota(int(requests), int(tokens))
    return found
