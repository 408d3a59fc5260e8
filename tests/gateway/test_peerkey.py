"""One secret, the same keys everywhere; and no socket in the open without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from stanchion.core.errors import ConfigError
from stanchion.core.peerkey import (
    beyond_loopback,
    check_address,
    connect_with,
    key_pair,
    serve_with,
)


def test_a_secret_gives_the_same_keys_each_time_and_another_gives_others():
    public, secret = key_pair("sesame")
    assert (public, secret) == key_pair("sesame")
    assert zmq.curve_public(secret) == public
    assert not {public, secret} & set(key_pair("sesame "))


@contextmanager
def asked(served: str, connected: str) -> Iterator[bool]:
    with zmq.Context() as context, context.socket(zmq.REP) as one, context.socket(zmq.REQ) as two:
        for socket in (one, two):
            socket.set(zmq.LINGER, 0)
        serve_with(one, served)
        connect_with(two, connected)
        one.bind("tcp://127.0.0.1:0")
        two.connect(one.get(zmq.LAST_ENDPOINT).rstrip(b"\0"))
        two.send(b"?")
        yield bool(one.poll(2000 if served == connected else 300))


@pytest.mark.parametrize(
    ("served", "connected"),
    [("", ""), ("a", "a"), ("a", "b"), ("a", ""), ("", "a")],
)
def test_only_those_with_the_same_key_hear_each_other(served: str, connected: str):
    with asked(served, connected) as heard:
        assert heard is (served == connected)


LOCAL = [
    "ipc:///tmp/x",
    "tcp://127.0.0.1:5",
    "tcp://127.9.9.9",
    "tcp://localhost:1",
    "tcp://[::1]:5",
]
OPEN = ["tcp://0.0.0.0:5", "tcp://10.0.0.1", "tcp://*:5", "tcp://host.example:5", "tcp://[::]:5"]


@pytest.mark.parametrize("address", [*LOCAL, *OPEN])
def test_what_other_machines_can_reach_needs_a_key(address: str):
    assert beyond_loopback(address) is (address in OPEN)
    check_address("join", address, "sesame")
    if address in OPEN:
        with pytest.raises(ConfigError, match="--peer-key"):
            check_address("join", address, "")
    else:
        check_address("join", address, "")


@pytest.mark.parametrize(
    "address", ["", "x", "tcp://", "ipc://", "inproc://x", "tcp://1.1.1.1:65536"]
)
def test_what_is_no_address_is_refused(address: str):
    with pytest.raises(ConfigError, match="join"):
        check_address("join", address, "sesame")
