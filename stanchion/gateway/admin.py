"""What `/admin` does, for holders of its own credential: drain, and abort by id.

There is nothing here to flush a cache or to quarantine pages by hand: workers know no such words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from stanchion.core.errors import NotFound, RequestRejected
from stanchion.gateway.body import Short, decode
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.generate import Generation
from stanchion.gateway.replies import Json

ABORTS_MAX = 4096


class DrainBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Without a worker it is the whole server, which then stops as at SIGTERM."""

    worker: Short | None = None


class AbortBody(Struct, frozen=True, forbid_unknown_fields=True):
    requests: Annotated[list[Short], Meta(max_length=ABORTS_MAX)] = []
    all: bool = False


class Admin:
    """`running` are the generations by our own id of the call; `stop` begins the drain."""

    def __init__(
        self, fleet: Fleet, running: Mapping[str, Generation], stop: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._running = running
        self._stop = stop

    def drain(self, raw: bytes) -> Json:
        body = decode(raw, DrainBody) if raw else DrainBody()
        if body.worker is None:
            self._stop()
            return {"draining": "all"}
        role = self._fleet.drain_worker(body.worker)
        if role is None:
            raise NotFound(f"there is no worker {body.worker!r} here")
        if role == "prefill":
            raise RequestRejected("worker", "a prefill worker drains with the whole server only")
        return {"draining": body.worker}

    def abort(self, raw: bytes) -> Json:
        """Ids as clients see them (`chatcmpl-...`, `cmpl-...`, `msg_...`) or without the prefix.
        Whole ids: none is the beginning of another."""
        body = decode(raw, AbortBody)
        if body.all == bool(body.requests):
            raise RequestRejected("requests", "a list of ids, or `all`: true, and not both")
        named = list(self._running) if body.all else list(map(_own, body.requests))
        found = [name for name in dict.fromkeys(named) if name in self._running]
        for name in found:
            self._running[name].abort("admin")
        return {"aborted": found, "unknown": [name for name in named if name not in self._running]}


def _own(shown: str) -> str:
    for prefix in ("chatcmpl-", "cmpl-", "msg_"):
        if shown.startswith(prefix):
            return shown.removeprefix(prefix)
    return shown
