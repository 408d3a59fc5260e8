"""The lab's way to a server: HTTP over aiohttp, the fastest client for streams that we measured.

A connection whose reply is not read to its end is closed, which is how a server learns that its
client has left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from stanchion.core.errors import ConfigError
from stanchion.lab.replay_run import Unreachable

JSON = {"content-type": "application/json"}
CONNECT_S = 30.0
LINE_BYTES_MAX = 1 << 20


@dataclass
class HttpReply:
    status: int
    headers: Mapping[str, str]
    response: aiohttp.ClientResponse

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.response.content.iter_any():
                yield chunk
        except aiohttp.ClientError as error:
            raise Unreachable(_words(error)) from None


class HttpClient:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[HttpReply]:
        try:
            response = await self._session.post(self._url + path, data=body, headers=JSON)
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(_words(error)) from None
        try:
            yield HttpReply(response.status, response.headers, response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def get(self, path: str) -> Any:
        """The JSON of a reply. Raise ConfigError where there is none."""
        try:
            async with self._session.get(self._url + path) as response:
                raw = await response.read()
                if response.status != 200:
                    raise ConfigError(f"{self._url}{path} answers with {response.status}")
            return msgspec.json.decode(raw)
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(f"{self._url} cannot be reached: {_words(error)}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._url}{path}: {error}") from None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@asynccontextmanager
async def client(url: str, api_key: str = "") -> AsyncIterator[HttpClient]:
    """To one server. Raise ConfigError where `url` is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=LINE_BYTES_MAX
    ) as session:
        yield HttpClient(url, session)
