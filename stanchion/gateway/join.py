"""The socket at which workers join: one ROUTER, one kind of message, each answered at once.

Promises: whatever comes is either a `Join` of bounded size or is dropped, counted, and logged at
most once a second; nothing that is said here can end the gateway or make it hold more than a few
frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Join, Refused, Welcome, decode_join, encode
from stanchion.core.peerkey import check_address, serve_with
from stanchion.gateway import journal

FRAME_BYTES_MAX = 65536
QUEUE_MAX = 1024
BATCH_MAX = 64  # messages heard before other tasks get a turn
LOG_S = 1.0

Answer = Callable[[Join], Welcome | Refused]


class JoinSocket:
    def __init__(self, answer: Answer) -> None:
        self.garbage = 0
        self.endpoint = ""
        self._answer = answer
        self._logged_at = 0.0

    def open(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str) -> None:
        """Raise ConfigError if it cannot be bound there."""
        check_address("cluster.join", address, key)
        self._socket = socket = context.socket(zmq.ROUTER)
        socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)  # a longer frame costs its sender the line
        socket.set(zmq.RCVHWM, QUEUE_MAX)
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.set(zmq.LINGER, 0)
        serve_with(socket, key)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cluster.join: cannot listen on {address}: {error}") from None
        bound = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.endpoint = bound.rstrip(b"\0").decode()
        self._descriptor = int(socket.get(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self.hear)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._socket.close()

    def hear(self) -> None:
        for _ in range(BATCH_MAX):
            if self._socket.closed:
                return
            try:
                peer, frame = self._receive()
            except zmq.Again:
                return
            self._take(peer, frame)
        asyncio.get_running_loop().call_soon(self.hear)

    def _receive(self) -> tuple[bytes, bytes | None]:
        """The sender, and what it said if that was one frame."""
        peer = self._socket.recv(zmq.NOBLOCK)
        frame: bytes | None = None
        frames = 0
        while self._socket.get(zmq.RCVMORE):
            frame = self._socket.recv(zmq.NOBLOCK)
            frames += 1
        return peer, frame if frames == 1 else None

    def _take(self, peer: bytes, frame: bytes | None) -> None:
        if frame is None:
            self._drop("frames")
            return
        try:
            join = decode_join(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._drop(type(error).__name__)
            return
        answer = self._answer(join)
        if isinstance(answer, Refused):
            self._log("join_refused", ",".join(one.split(":")[0] for one in answer.differences))
        try:
            self._socket.send_multipart((peer, encode(answer)), zmq.NOBLOCK)
        except zmq.Again:
            return  # it does not read its answers: it will ask again

    def _drop(self, kind: str) -> None:
        self.garbage += 1
        self._log("join_garbage", kind)

    def _log(self, event: str, kind: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            journal.write(journal.Line(event=event, error=kind[:200]), logging.WARNING)
