"""The wires between decode and prefill workers: ZeroMQ, one socket a pair, frames of `words`.

What does not parse is dropped with a line in the log, and what cannot be sent is dropped as well:
the protocol asks again. No frame is trusted with more than its bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from stanchion.core.messages import Partner
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.prefill import PrefillSide
from stanchion.disagg.words import decode_from_decode, decode_from_prefill, encode
from stanchion.kv.transfer.fence import Watch

log = logging.getLogger(__name__)

HEARD_MAX = 256  # frames taken from one socket at a time
QUEUE_MAX = 4096  # frames waiting to be sent to one peer; what is over is lost, and asked for again
FRAME_BYTES_MAX = 512 * 2**20
Socket = zmq.Socket[bytes]
Secure = Callable[[Socket], None]


class Link(Protocol):
    """A worker's wire to its peers."""

    def register(self, poller: zmq.Poller) -> None: ...
    def hear(self, now: float) -> None: ...
    def say(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class PrefillLink:
    """Prefill is bound, and answers whoever asks. `bells` are readable when a write has ended."""

    side: PrefillSide
    socket: Socket
    bells: Sequence[int]

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        for bell in self.bells:
            poller.register(bell, zmq.POLLIN)

    def hear(self, now: float) -> None:
        for _ in range(HEARD_MAX):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                log.error("a message of %d frames from a decode worker: dropped", len(parts))
                continue
            address, frame = parts
            try:
                word = decode_from_decode(frame)
            except (msgspec.MsgspecError, RecursionError) as error:
                log.error("a decode worker's %d bytes do not parse: %s", len(frame), error)
                continue
            self.side.hear(word, address, now)

    def say(self) -> None:
        out, self.side.out = self.side.out, []
        for address, word in out:
            self.socket.send_multipart((address, encode(word)))

    def close(self) -> None:
        self.socket.close()


@dataclass
class DecodeLink:
    """Decode connects to each prefill worker that a gateway names, and watches its processes."""

    side: DecodeSide
    context: zmq.Context[Socket]
    secure: Secure
    _sockets: dict[int, Socket] = field(default_factory=dict)  # by incarnation
    _watches: dict[int, list[Watch]] = field(default_factory=dict)  # of those that have not ended
    _ended: dict[int, None] = field(default_factory=dict)  # of peers that are not forgotten yet

    def watch(self, incarnation: int, pids: Sequence[int]) -> None:
        if incarnation not in self._watches and incarnation not in self._ended:
            self._watches[incarnation] = [Watch(pid) for pid in pids]

    def register(self, poller: zmq.Poller) -> None:
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        for watches in self._watches.values():
            for watch in watches:
                poller.register(watch, zmq.POLLIN)

    def hear(self, now: float) -> None:
        for incarnation, socket in self._sockets.items():
            self._hear(incarnation, socket, now)
        for incarnation, watches in list(self._watches.items()):
            for watch in [one for one in watches if one.ended()]:
                watches.remove(watch)
                watch.close()
            if not watches:  # not one of its processes is left
                del self._watches[incarnation]
                self._ended[incarnation] = None
                self.side.peer_ended(incarnation)
        for gone in [one for one in self._sockets if one not in self.side.peers]:
            self._sockets.pop(gone).close()
            self._ended.pop(gone, None)
            for watch in self._watches.pop(gone, []):
                watch.close()

    def _hear(self, incarnation: int, socket: Socket, now: float) -> None:
        for _ in range(HEARD_MAX):
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                word = decode_from_prefill(frame)
            except (msgspec.MsgspecError, RecursionError) as error:
                log.error("a prefill worker's %d bytes do not parse: %s", len(frame), error)
                continue
            peer = self.side.peers.get(incarnation)
            if peer is not None:
                self.side.hear(peer, word, now)

    def say(self) -> None:
        out, self.side.out = self.side.out, []
        for partner, word in out:
            socket = self._sockets.get(partner.incarnation) or self._connect(partner)
            if socket is None:
                continue
            try:
                socket.send(encode(word), zmq.NOBLOCK)
            except zmq.Again:
                log.warning("%s takes no more frames: one is lost", partner.name)

    def _connect(self, partner: Partner) -> Socket | None:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.LINGER, 0)
        self.secure(socket)
        try:
            socket.connect(partner.address)
        except zmq.ZMQError as error:
            log.error("%s cannot be reached at %r: %s", partner.name, partner.address, error)
            socket.close()
            return None
        self._sockets[partner.incarnation] = socket
        return socket

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        for watches in self._watches.values():
            for watch in watches:
                watch.close()
