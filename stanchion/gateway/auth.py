"""Who is calling. Deny by default: a route is open only if it says so, an unknown one is not.

Secrets are kept and compared as digests, all of them each time, so that neither a match's place
nor a secret's length shows in the time it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest

from stanchion.core.errors import ConfigError, Unauthorized
from stanchion.core.request import NAME_CHARACTERS_MAX

DEFAULT_TENANT = "default"


class Keys:
    def __init__(self, keys: tuple[str, ...]) -> None:
        self._tenants = [(_digest(secret), name) for name, secret in map(_split, keys)]
        if len({digest for digest, _ in self._tenants}) != len(self._tenants):
            raise ConfigError("api_keys: the same secret is given twice")

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """The authenticated tenant of these headers (names in lower case)."""
        if not self._tenants:
            return DEFAULT_TENANT
        shown = _digest_bytes(_presented(headers))
        found = [name for digest, name in self._tenants if compare_digest(digest, shown)]
        if not found:
            raise Unauthorized("no API key, or not a key of this server")
        return found[0]


class AdminKeys:
    """A credential of its own: no tenant's key opens what these do; without any, nothing does."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        if not all(secrets):
            raise ConfigError("admin_keys: each is a secret, and not empty")
        self._digests = [_digest(secret) for secret in secrets]

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        shown = _digest_bytes(_presented(headers))
        if not sum(compare_digest(digest, shown) for digest in self._digests):
            raise Unauthorized("no admin key, or not one of this server")


def _presented(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")


def _split(key: str) -> tuple[str, str]:
    name, colon, secret = key.rpartition(":")
    if not colon:
        name = DEFAULT_TENANT
    if not secret or not name or len(name) > NAME_CHARACTERS_MAX:
        raise ConfigError("api_keys: each is `secret` or `name:secret`, neither part empty")
    return name, secret


def _digest(secret: str) -> bytes:
    return _digest_bytes(secret.encode())


def _digest_bytes(secret: bytes) -> bytes:
    return sha256(secret).digest()
