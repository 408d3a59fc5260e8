"""HTTP to one server: nothing that it says is read without a bound, or waited for without one.

The reader stops taking bytes when nobody reads (aiohttp's flow control, 64 KiB), a line and a body
have a longest length, headers aiohttp's own. Redirects, cookies, proxies of the environment and
compression are off: none has a place between a gateway and its servers, and the last could turn a
few bytes into many.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from stanchion.core.outcome import PeerLost
from stanchion.gateway.upstream.events import Events
from stanchion.gateway.upstream.wire import Asked, Wrong, refusal

ERROR_BYTES = 2**16  # of a refusal's body
BUFFER_BYTES = 2**16
KEPT_S = 4.0  # idle connections; uvicorn, in front of most of these servers, closes them after 5
GONE = (aiohttp.ClientError, OSError)  # what aiohttp raises where the other side is at fault


@dataclass(frozen=True)
class Patience:
    """`connect_s` for a connection, `read_s` from one byte to the next, `poll_s` between looks at
    a server, and for each of those looks at most `look_s`."""

    connect_s: float = 5.0
    read_s: float = 300.0
    poll_s: float = 0.5
    look_s: float = 5.0


@asynccontextmanager
async def session(patience: Patience, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),  # bounded by in_flight
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=patience.connect_s, sock_read=patience.read_s
        ),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        json_serialize=lambda body: msgspec.json.encode(body).decode(),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=BUFFER_BYTES,
    ) as made:
        yield made


class Server:
    """Every method raises Wrong, whatever goes wrong."""

    def __init__(self, made: aiohttp.ClientSession, url: str, patience: Patience) -> None:
        self._session = made
        self._url = url
        self.patience = patience

    async def whole(self, asked: Asked, bytes_max: int, within_s: float | None = None) -> bytes:
        """The body of a success."""
        timeout = self._session.timeout
        if within_s is not None:
            timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._request(asked, timeout) as reply:
                await _check(reply)
                return await _body(reply, bytes_max)
        except TimeoutError:
            raise Wrong(PeerLost("the server did not answer in time"), "silent") from None
        except GONE as error:
            raise _gone(error) from None

    async def events(self, asked: Asked, line_bytes_max: int) -> AsyncGenerator[bytes, None]:
        """The data of a stream, event by event, to the end of the body."""
        events = Events(line_bytes_max)
        try:
            async with self._request(asked, self._session.timeout) as reply:
                await _check(reply)
                async for part in reply.content.iter_any():
                    for event in events.push(part):
                        yield event
        except TimeoutError:
            raise Wrong(PeerLost("the server went silent amid an answer"), "silent") from None
        except GONE as error:
            raise _gone(error) from None

    def _request(
        self, asked: Asked, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client._RequestContextManager:
        url = self._url + asked.path
        if asked.body is None:
            return self._session.get(url, allow_redirects=False, timeout=timeout)
        return self._session.post(url, json=asked.body, allow_redirects=False, timeout=timeout)


async def _check(reply: aiohttp.ClientResponse) -> None:
    if not 200 <= reply.status < 300:
        body = await reply.content.read(ERROR_BYTES)
        outcome = refusal(reply.status, reply.headers.get("retry-after"), body)
        raise Wrong(outcome, "gone" if reply.status >= 500 else "there")


async def _body(reply: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    found = bytearray()
    async for part in reply.content.iter_any():
        found += part
        if len(found) > bytes_max:
            raise Wrong(PeerLost(f"the server's answer has more than {bytes_max} bytes"))
    return bytes(found)


def _gone(error: Exception) -> Wrong:
    # Its words may hold the address, never anything that was asked or answered.
    return Wrong(PeerLost(f"the connection to the server failed: {type(error).__name__}"), "gone")
