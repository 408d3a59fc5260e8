"""One HTTP call over ASGI: its headers, its body within bounds, its answer. No routes, no words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from stanchion.core.errors import Overloaded, QuotaExceeded, RequestRejected, ServeError, TooLarge
from stanchion.core.request import NAME_CHARACTERS_MAX
from stanchion.gateway.dialect import Headers
from stanchion.gateway.replies import encode

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
DISCARD_BYTES_MAX = 256 * 2**20
DISCARD_S = 10.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._:@/+=-]")


class Budget:
    """Bytes of bodies held at once, over all calls: many small ones, or few large ones."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    def take(self, size: int) -> None:
        if size > self._left:
            raise Overloaded("too many request bodies are arriving")
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size


class Held:
    """What one call has of the budget: given back on leaving, however it leaves."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        self._budget.take(size)
        self._size += size

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.give(self._size)


@dataclass
class Call:
    """`name` is our own id of the call; `echoed` is what the client gets back as request id."""

    scope: Scope
    receive: Receive
    send: Send
    name: str
    started: bool = False
    pending: bool = True  # the client may still be sending its body
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    marks: Headers = field(default_factory=list)  # go out with whatever is answered
    raw: bytes | None = field(default=None, repr=False)  # its body, where that is recorded

    def __post_init__(self) -> None:
        self.headers = {name.lower(): value for name, value in self.scope["headers"]}
        self.pending = self.scope["method"] not in ("GET", "HEAD")

    @property
    def echoed(self) -> str:
        """A client's own id is an echo and nothing else: cut, cleaned, never a key of ours."""
        given = self.headers.get(b"x-request-id", b"")[:NAME_CHARACTERS_MAX].decode("latin-1")
        return _UNSAFE.sub("", given) or self.name

    # ---- in ---------------------------------------------------------------------------------

    async def body(self, bytes_max: int, wait_s: float, held: Held) -> bytes:
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > bytes_max:
            raise TooLarge(f"body: {int(length)} bytes; at most {bytes_max}")
        try:
            async with asyncio.timeout(wait_s):
                return await self._read(bytes_max, held)
        except TimeoutError:
            raise RequestRejected("body", f"did not arrive within {wait_s:g} s") from None

    async def _read(self, bytes_max: int, held: Held) -> bytes:
        parts: list[bytes] = []
        size = 0
        while self.pending:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.pending = False
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > bytes_max:
                raise TooLarge(f"body: over {bytes_max} bytes")
            held.take(len(part))
            parts.append(part)
            self.pending = message.get("more_body", False)
        return b"".join(parts)

    async def gone(self) -> None:
        """Returns when the client has left. The body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    # ---- out --------------------------------------------------------------------------------

    async def json(self, status: int, body: Any, headers: Headers | None = None) -> None:
        await self.whole(status, JSON, encode(body), headers)

    async def whole(
        self, status: int, kind: bytes, body: bytes, headers: Headers | None = None
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, kind, [length, *(headers or [])])
        shown = b"" if self.scope["method"] == "HEAD" else body
        if self.pending:
            # Closing on a client that still sends would destroy the answer on its way there.
            await self.write(shown)
            await self._discard()
            shown = b""
        await self.send({"type": "http.response.body", "body": shown})

    async def start(self, status: int, kind: bytes, headers: Headers) -> None:
        own = [(b"content-type", kind), (b"x-request-id", self.echoed.encode("latin-1"))]
        if self.pending:
            own.append((b"connection", b"close"))
        self.started, self.status = True, status
        message = {
            "type": "http.response.start",
            "status": status,
            "headers": [*own, *self.marks, *headers],
        }
        await self.send(message)

    async def write(self, part: bytes) -> None:
        await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def error(self, error: ServeError, body: Any, retry_after_s: float) -> None:
        headers: Headers = []
        if isinstance(error, Overloaded | QuotaExceeded):
            retry_after_s = error.retry_after_s
        if error.retry:
            headers.append((b"retry-after", str(max(1, ceil(retry_after_s))).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.json(error.status, body, headers)

    async def _discard(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                while self.pending and size < DISCARD_BYTES_MAX:
                    message = await self.receive()
                    size += len(message.get("body", b""))
                    self.pending = message.get("more_body", False)
        except TimeoutError:
            pass


class Gone(Exception):
    """The client left before its request was whole: there is nobody to answer."""
