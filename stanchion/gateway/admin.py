"""What `/admin` does, for holders of its own credential: drain, abort by id, give up what workers
keep, take one out of rotation and let it back, and tell how all is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from stanchion.core.errors import NotFound, RequestRejected
from stanchion.core.messages import Flush, Order, Quarantine
from stanchion.core.request import TokenId
from stanchion.gateway.auth import DEFAULT_TENANT
from stanchion.gateway.body import Short, decode
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.generate import Generation
from stanchion.gateway.replies import Json
from stanchion.gateway.state import totals, workers

ABORTS_MAX = 4096
ADMIN_TOKENS_MAX = 131_072  # as many as a body of its size may hold


class DrainBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Without a worker it is the whole server, which then stops as at SIGTERM."""

    worker: Short | None = None


class AbortBody(Struct, frozen=True, forbid_unknown_fields=True):
    requests: Annotated[list[Short], Meta(max_length=ABORTS_MAX)] = []
    all: bool = False


class FlushBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Without a worker: of all of them."""

    worker: Short | None = None


class QuarantineBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker out of rotation, or `back` into it; or a prefix of `tokens` that nobody, or that
    worker, may find again."""

    worker: Short | None = None
    back: bool = False
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=ADMIN_TOKENS_MAX)] | None = None
    tenant: Short = DEFAULT_TENANT
    salt: Short = ""


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

    def flush(self, raw: bytes) -> Json:
        body = decode(raw, FlushBody) if raw else FlushBody()
        return {"flushing": self._told(Flush(), body.worker)}

    def quarantine(self, raw: bytes) -> Json:
        body = decode(raw, QuarantineBody)
        if body.tokens is not None:
            order = Quarantine(tokens=body.tokens, tenant=body.tenant, salt=body.salt)
            return {"dropping": self._told(order, body.worker)}
        if body.worker is None:
            raise RequestRejected("worker", "the worker to take out, or `tokens` of a prefix")
        if not self._fleet.take_out(body.worker, not body.back):
            raise NotFound(f"there is no worker {body.worker!r} here")
        return {"back" if body.back else "out": body.worker}

    def state(self) -> Json:
        answers = [one for generation in self._running.values() for one in generation.states()]
        return {"workers": workers(self._fleet), "requests": answers, **totals(self._fleet)}

    def _told(self, order: Order, worker: str | None) -> list[str]:
        told = self._fleet.tell(order, worker)
        if worker is not None and not told:
            raise NotFound(f"there is no worker {worker!r} here")
        return told


def _own(shown: str) -> str:
    for prefix in ("chatcmpl-", "cmpl-", "msg_"):
        if shown.startswith(prefix):
            return shown.removeprefix(prefix)
    return shown
