"""A prefill and a decode side in one process, over a wire of lists: what a handoff costs, alone.

Frames cross as bytes, in order, within the turn in which they were said; KV goes through shared
memory, by the transfer's own thread. The unsafe pair is what the handoff replaces: destinations
are free again as soon as a request was aborted, sources are held by nobody, and writes go out
without doors. Where its pools are so large that nothing is overwritten, it gives the same answers.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from stanchion.core.messages import Abort, Ended, FromWorker, Partner, Role, Start, Tokens
from stanchion.disagg.assemble import Post, arena_for, decode_side, prefill_side
from stanchion.disagg.check import Mode
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.lanes import TransferLane
from stanchion.disagg.peer import Times
from stanchion.disagg.prefill import Lane, PrefillSide
from stanchion.disagg.words import decode_from_decode, decode_from_prefill, encode
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.loop import Engine
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Limits
from stanchion.kv.schema import Schema
from stanchion.kv.transfer.words import Invitation, Transfer, Write, WriteEnded
from stanchion.model.text import Model

INCARNATIONS: dict[Role, int] = {"prefill": 1, "decode": 2}
ADDRESS = b"decode"
PARTNER = Partner("prefill", "prefill", INCARNATIONS["prefill"])
WAIT_S = 0.0005  # for the end of a write, where nothing else is to be done


@dataclass
class Pair:
    prefill: PrefillSide
    decode: DecodeSide
    transfer: Transfer

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill.engine, self.decode.engine

    @property
    def busy(self) -> bool:
        return any(one.busy for one in self.engines) or bool(self.prefill.open or self.decode.open)

    def turn(self, heard: list[Start | Abort], now: float) -> list[FromWorker]:
        """One step of both sides, and all that they say to each other."""
        said = self.decode.step(heard, now)
        to_prefill, self.decode.out = self.decode.out, []
        for _, asked in to_prefill:
            self.prefill.hear(decode_from_decode(encode(asked)), ADDRESS, now)
        self.prefill.step([], now)
        to_decode, self.prefill.out = self.prefill.out, []
        for _, word in to_decode:
            peer = self.decode.peers.get(PARTNER.incarnation)
            if peer is not None:
                self.decode.hear(peer, decode_from_prefill(encode(word)), now)
        return said

    def wait(self) -> None:
        """For the end of a write, if both engines have nothing to compute until then."""
        prefill, decode = self.engines
        if self.prefill.open and not prefill.busy and decode.flight is None:
            select.select([self.transfer], [], [], WAIT_S)

    def forget(self) -> None:
        """Each run begins with empty caches."""
        for engine in self.engines:
            engine.tree.flush()

    def first_token_s(self, start: Start) -> float:
        """Seconds from arrival to the first token; the request is run to its end after."""
        began = time.monotonic()
        said = self.turn([start], began)
        while not any(isinstance(one, Tokens) for one in said):
            self.wait()
            said = self.turn([], time.monotonic())
        took = time.monotonic() - began
        while self.busy:
            self.wait()
            self.turn([], time.monotonic())
        return took

    def close(self) -> None:
        self.transfer.close()


def build(
    model: Model, limits: Limits, pages: int, check: Mode = "off", unsafe: bool = False
) -> Pair:
    posts = [_post(model, "prefill", check, unsafe), _post(model, "decode", check, unsafe)]
    parts = [_parts(model, limits, pages, post.role) for post in posts]
    prefill, _ = prefill_side(parts[0], posts[0])
    decode = decode_side(parts[1], posts[1], lambda *_: None)
    assert isinstance(prefill.lane, TransferLane)
    transfer = prefill.lane.transfer
    if unsafe:
        prefill.lane = TransferLane(transfer, Doorless(transfer), model.schema.page_tokens)
        parts[0].runner.on_rows = partial(_rows_ready_unpinned, prefill)
    return Pair(prefill, decode, transfer)


def _post(model: Model, role: Role, check: Mode, unsafe: bool) -> Post:
    return Post(
        role=role,
        name=role,
        incarnation=INCARNATIONS[role],
        identity=model.schema.described(),
        times=Times(),
        check=check,
        failpoints=frozenset({"release_before_drained"} if unsafe else ()),
    )


def _parts(model: Model, limits: Limits, pages: int, role: Role) -> Parts:
    return assemble(model, limits, pages, arena=arena_for(role, model.schema, pages))


# ---- traffic --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    start: Start
    leaves_after: int | None  # turns from its start to its abort


def serve(pair: Pair, asked: Sequence[Asked], together: int, turn_s: float) -> dict[str, list[int]]:
    """Run them all, so many at once; the time that both sides are told counts turns. Returns what
    each said."""
    answers: dict[str, list[int]] = {}
    waiting, open_, leaving = list(reversed(asked)), dict[str, None](), dict[int, list[str]]()
    turn = 0
    while waiting or pair.busy:
        heard: list[Start | Abort] = [
            Abort(name, "client") for name in leaving.pop(turn, []) if name in open_
        ]
        while waiting and len(open_) < together:
            one = waiting.pop()
            name = one.start.request
            open_[name], answers[name] = None, []
            heard.append(one.start)
            if one.leaves_after is not None:
                leaving.setdefault(turn + one.leaves_after, []).append(name)
        for word in pair.turn(heard, turn * turn_s):
            if isinstance(word, Tokens):
                answers[word.request] += word.tokens
            elif isinstance(word, Ended):
                del open_[word.request]
        pair.wait()
        turn += 1
    return answers


# ---- lanes ----------------------------------------------------------------------------------


@dataclass
class Link:
    """A link that carries so many bytes a second, one write after the other: a write is copied at
    once, and said to have ended when that link would have carried it."""

    lane: Lane
    schema: Schema
    bytes_s: float
    clock: Callable[[], float] = time.monotonic
    _free_at: float = 0.0
    _due: dict[int, float] = field(default_factory=dict)
    _ended: list[WriteEnded] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return self.lane.bytes_sent

    def connect(self, peer: int, invitation: Invitation) -> None:
        self.lane.connect(peer, invitation)

    def disconnect(self, peer: int) -> None:
        self.lane.disconnect(peer)

    def send(self, write: Write) -> None:
        rows = (len(write.source) - 1) * self.schema.page_tokens + write.last_rows
        size = rows * sum(one.row_bytes for one in self.schema.buffers if one.layer == write.layer)
        self._free_at = max(self._free_at, self.clock()) + size / self.bytes_s
        self._due[write.number] = self._free_at
        self.lane.send(write)

    def cut(self, numbers: Sequence[int]) -> None:
        self.lane.cut(numbers)

    def poll(self) -> list[WriteEnded]:
        self._ended += self.lane.poll()
        now = self.clock()
        over = [one for one in self._ended if self._due[one.number] <= now]
        self._ended = [one for one in self._ended if self._due[one.number] > now]
        for one in over:
            del self._due[one.number]
        return over


@dataclass
class Held:
    """Keeps every write until the engine has computed all that it was asked for."""

    lane: Lane
    engine: Engine
    _writes: list[Write] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return self.lane.bytes_sent

    def connect(self, peer: int, invitation: Invitation) -> None:
        self.lane.connect(peer, invitation)

    def disconnect(self, peer: int) -> None:
        self.lane.disconnect(peer)

    def send(self, write: Write) -> None:
        self._writes.append(write)

    def cut(self, numbers: Sequence[int]) -> None:
        kept = [write.number for write in self._writes]  # those are sent all the same
        self.lane.cut([number for number in numbers if number not in kept])

    def poll(self) -> list[WriteEnded]:
        if not self.engine.busy:
            writes, self._writes = self._writes, []
            for write in writes:
                self.lane.send(write)
        return self.lane.poll()


# ---- the unsafe way -------------------------------------------------------------------------


@dataclass
class Doorless:
    """Submits writes with no doors in front of them."""

    transfer: Transfer

    def send(self, write: Write) -> None:
        self.transfer.submit(write)


def _rows_ready_unpinned(
    side: PrefillSide, layer: int, ends: Sequence[tuple[Request, int]]
) -> None:
    """`PrefillSide.rows_ready` without the pins of the handoff's own; keep the rest like it."""
    for request, end in ends:
        known = side._names.get(request.name)
        if known is None or known[1].state.phase != "open":
            continue
        session, sending = known
        if not len(sending.source):
            sending.source = request.pages
            sending.generations = request.generations
        whole = end // side.engine.ready.page_tokens
        total = len(sending.destination) + sending.first_page
        side._send(session, sending, layer, total if end >= sending.prompt_tokens else whole)
