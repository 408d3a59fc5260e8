"""Which priorities a tenant may ask for, and which it has if it does not say. Pure.

As in vLLM, of two requests the one of lower priority is earlier. What that is worth is bounded:
see docs/ROUTING.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stanchion.core.errors import ConfigError, RequestRejected
from stanchion.core.request import PRIORITY_MAX


@dataclass(frozen=True)
class Range:
    """`usual` where a request does not say; nothing below `best` is granted."""

    usual: int = 0
    best: int = 0


class Priorities:
    """`own` says what some tenants have instead of `default`; all others have that, each."""

    def __init__(self, default: Range, own: Mapping[str, Range]) -> None:
        self._default = default
        self._own = own

    def of(self, tenant: str, asked: int | None) -> int:
        """Raise RequestRejected, with the bound, where a tenant asks for too much."""
        may = self._own.get(tenant, self._default)
        if asked is None:
            return may.usual
        if asked < may.best:
            raise RequestRejected("priority", f"{asked} is below {may.best}, this tenant's bound")
        return asked


def ranges(said: Sequence[str]) -> dict[str, Range]:
    """Of "NAME=USUAL:BEST" each. Raise ConfigError."""
    found: dict[str, Range] = {}
    for one in said:
        name, _, bounds = one.partition("=")
        usual, _, best = bounds.partition(":")
        try:
            made = Range(int(usual), int(best))
        except ValueError:
            raise ConfigError(f"priority {one!r} must be NAME=USUAL:BEST") from None
        if not name or not -PRIORITY_MAX <= made.best <= made.usual <= PRIORITY_MAX:
            raise ConfigError(
                f"priority {one!r}: -{PRIORITY_MAX} <= BEST <= USUAL <= {PRIORITY_MAX}, and a name"
            )
        if name in found:
            raise ConfigError(f"priority: {name} has two")
        found[name] = made
    return found
