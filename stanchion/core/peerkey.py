"""One secret shared by the processes of a cluster, made into CURVE keys for their sockets.

Promises: with a key, a socket talks to nobody who does not have the same one, and what it says is
encrypted; without one (empty), nothing changes; and a socket that other machines can reach never
comes to be without one. The public key is derived too and never goes over a wire, so whoever can
connect knows the secret.
"""

from __future__ import annotations

from hashlib import blake2b
from ipaddress import ip_address
from typing import Any, Protocol

import zmq
from zmq.utils import z85

from stanchion.core.errors import ConfigError

PORT_MAX = 65535


class Socket(Protocol):
    """What this needs of a ZeroMQ socket."""

    def set(self, option: int, value: Any, /) -> None: ...


def key_pair(key: str) -> tuple[bytes, bytes]:
    """(public, secret) in z85: the same in every process that was given the same secret."""
    raw = blake2b(key.encode(), digest_size=32, person=b"stanchion.peer").digest()
    secret = z85.encode(raw)
    return zmq.curve_public(secret), secret


def serve_with(socket: Socket, key: str) -> None:
    """For the side that binds; before it does."""
    if key:
        _, secret = key_pair(key)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, secret)


def connect_with(socket: Socket, key: str) -> None:
    """For the side that connects; before it does."""
    if key:
        public, secret = key_pair(key)
        socket.set(zmq.CURVE_SERVERKEY, public)
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, secret)


def check_address(name: str, address: str, key: str) -> None:
    """Raise ConfigError unless `address` is one that a socket may have with this key."""
    scheme, sign, rest = address.partition("://")
    port = rest.rpartition(":")[2] if scheme == "tcp" and not rest.endswith("]") else ""
    beyond = port.isdecimal() and int(port) > PORT_MAX
    if not sign or scheme not in ("ipc", "tcp") or not rest or beyond:
        raise ConfigError(f"{name} is {address!r}; it must be tcp://HOST:PORT or ipc://PATH")
    if not key and beyond_loopback(address):
        raise ConfigError(
            f"{name} {address} can be reached from other machines: give all processes of the "
            "cluster the same --peer-key (or STANCHION_PEER_KEY), or use a loopback address"
        )


def beyond_loopback(address: str) -> bool:
    """Whether other machines can reach it, as far as it says. Names but localhost may be theirs."""
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return False
    host = rest if rest.endswith("]") else rest.rsplit(":", 1)[0]
    host = host.strip("[]")
    if host == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return True
