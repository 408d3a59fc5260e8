"""A prefill and a decode side in one process: real engines, real shared memory, a wire of lists.

Time is a number that the test moves; frames cross as bytes, in the order that the test picks, and
may be lost or repeated. The oracle is the engine rig's: the same request alone, cold, unified.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stanchion.core.messages import Abort, Ended, Partner, Start, Suspected
from stanchion.core.outcome import Completed, Outcome
from stanchion.core.request import Sampling
from stanchion.disagg.assemble import Post, arena_for, decode_side, prefill_side
from stanchion.disagg.check import Mode
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.lanes import TransferLane
from stanchion.disagg.peer import Times
from stanchion.disagg.prefill import PrefillSide
from stanchion.disagg.words import decode_from_decode, decode_from_prefill, encode
from stanchion.engine.assemble import assemble
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.transfer.words import Write
from stanchion.model.hashed import END_TOKEN, HashModel
from stanchion.sim.choices import Choices
from tests.engine.rig import Heard, solo

TIMES = Times(beat_s=0.5, silence_s=5.0, drain_s=60.0)


@dataclass
class Frame:
    prefill: int  # place of the prefill worker
    to_prefill: bool
    decode: int
    data: bytes


@dataclass
class Settings:
    limits: Limits = field(default_factory=lambda: Limits(chunk_tokens=64))
    pages: int = 256
    page_tokens: int = 16
    top_k: int | None = None
    check: Mode = "off"
    times: Times = TIMES
    slow_ms: float = 0.0
    poison: bool = False
    transport: str = "shm"
    failpoints: tuple[str, ...] = ()
    tiers: TierPlan | None = None
    turn: Callable[[], None] = lambda: None  # lets the tiers' queues get on


def post(role: str, name: str, number: int, settings: Settings) -> Post:
    identity = {"model": "hashed", "page_tokens": str(settings.page_tokens)}
    return Post(
        role=role,
        name=name,
        incarnation=number,
        identity=identity,
        times=settings.times,
        check=settings.check,
        transport=settings.transport,
        slow_transfer_ms=settings.slow_ms,
        failpoints=frozenset(settings.failpoints),
    )  # type: ignore[arg-type]


def prefill(name: str, number: int, settings: Settings) -> PrefillSide:
    parts = assemble(
        HashModel(settings.page_tokens, settings.limits.draft_tokens > 0, settings.top_k),
        settings.limits, settings.pages, eos_ids=(END_TOKEN,), poisoned=settings.poison,
        tiers=settings.tiers,
    )  # fmt: skip
    side, _ = prefill_side(parts, post("prefill", name, number, settings))
    counter = itertools.count(1000 * number)
    side.draw = lambda: next(counter)
    return side


def decode(name: str, number: int, settings: Settings) -> DecodeSide:
    model = HashModel(settings.page_tokens, settings.limits.draft_tokens > 0, settings.top_k)
    parts = assemble(
        model, settings.limits, settings.pages, eos_ids=(END_TOKEN,), record_drafts=True,
        arena=arena_for("decode", model.schema, settings.pages), poisoned=settings.poison,
        tiers=settings.tiers,
    )  # fmt: skip
    return decode_side(parts, post("decode", name, number, settings), lambda *_: None)


@dataclass
class Held:
    """A lane that keeps writes back until it is told: the network at its worst. What is held has
    begun for whoever waits for it: a cut does not stop it, as with RDMA."""

    lane: TransferLane
    holding: bool = True
    writes: list[Write] = field(default_factory=list)

    def send(self, write: Write) -> None:
        if self.holding:
            self.lane.note(write)
            self.writes.append(write)
        else:
            self.lane.send(write)

    def release(self) -> None:
        """Let all go, newest first: nobody promises an order."""
        self.holding = False
        while self.writes:
            self.lane.sender.send(self.writes.pop())

    def cut(self, numbers: Sequence[int]) -> None:
        held = [write.number for write in self.writes]
        self.lane.cut([number for number in numbers if number not in held])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)


def held(cluster: Cluster, at: int = 0) -> Held:
    side = cluster.prefills[at]
    assert isinstance(side.lane, TransferLane)
    lane = Held(side.lane)
    side.lane = lane
    return lane


@dataclass
class Cluster:
    """`picks` chooses which frame is delivered next, and which are lost or come twice."""

    settings: Settings
    prefills: list[PrefillSide]
    decodes: list[DecodeSide]
    picks: Choices | None = None
    losses: int = 0
    repeats: int = 0
    now: float = 0.0
    wire: list[Frame] = field(default_factory=list)
    heard: dict[str, Heard] = field(default_factory=dict)
    where: dict[str, int] = field(default_factory=dict)
    suspected: list[Suspected] = field(default_factory=list)
    mute: bool = False  # what prefill workers say is lost
    stopped: dict[int, None] = field(default_factory=dict)  # prefill workers that do not run

    @classmethod
    def of(cls, settings: Settings, prefills: int = 1, decodes: int = 1) -> Cluster:
        return cls(
            settings,
            [prefill(f"prefill-{at}", 1 + at, settings) for at in range(prefills)],
            [decode(f"decode-{at}", 101 + at, settings) for at in range(decodes)],
        )

    def partner(self, at: int) -> Partner:
        side = self.prefills[at]
        return Partner(f"prefill-{at}", str(at), side.incarnation)

    def step(self, heard: Sequence[Start | Abort] = (), at: int = 0, tick: float = 0.1) -> None:
        """One turn of every worker; `heard` goes to decode worker `at`."""
        self.now += tick
        for message in heard:
            if isinstance(message, Start):
                self.heard[message.request] = Heard()
                self.where[message.request] = at
        for place, side in enumerate(self.decodes):
            for message in side.step(list(heard) if place == at else [], self.now):
                if isinstance(message, Suspected):
                    self.suspected.append(message)
                else:
                    self.heard[message.request].take(message)
            out, side.out = side.out, []
            for partner, word in out:
                self.wire.append(Frame(int(partner.address), True, place, encode(word)))
        for place, prefills in enumerate(self.prefills):
            if place in self.stopped:
                continue
            assert prefills.step([], self.now) == []
            out_, prefills.out = prefills.out, []
            for address, word_ in out_:
                self.wire.append(Frame(place, False, int(address), encode(word_)))
        self._deliver()
        self.settings.turn()

    def _deliver(self) -> None:
        frames, self.wire = self.wire, []
        while frames:
            frame = frames.pop(self.picks.pick(len(frames)) if self.picks else 0)
            if self.picks and self.losses and not self.picks.pick(10):
                self.losses -= 1
                continue
            if self.picks and self.repeats and not self.picks.pick(10):
                self.repeats -= 1
                self.wire.append(frame)
            if self.picks and not self.picks.pick(4):
                self.wire.append(frame)  # it comes later
                continue
            self._hand(frame)

    def _hand(self, frame: Frame) -> None:
        if frame.to_prefill:
            if frame.prefill in self.stopped:
                self.wire.append(frame)
                return
            word = decode_from_decode(frame.data)
            self.prefills[frame.prefill].hear(word, str(frame.decode).encode(), self.now)
        elif not self.mute:
            side = self.decodes[frame.decode]
            peer = side.peers.get(self.prefills[frame.prefill].incarnation)
            if peer is not None:
                side.hear(peer, decode_from_prefill(frame.data), self.now)

    @property
    def busy(self) -> bool:
        decodes = any(side.engine.busy or side.open or side._said for side in self.decodes)
        return decodes or any(side.engine.busy or side.open for side in self.prefills)

    def settle(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if not self.busy:
                return
            self.step()
            self._breathe()
        raise AssertionError(f"still busy: {self.audit()}")

    def _breathe(self) -> None:
        """The transfers' threads have something to do: wait a moment for the end of it."""
        bells = [side.lane.transfer for side in self.prefills if side._writes]  # type: ignore
        if bells:
            select.select(bells, [], [], 0.001)

    def until(self, true: Callable[[], bool], steps: int = 400) -> None:
        for _ in range(steps):
            if true():
                return
            self.step()
            self._breathe()
        raise AssertionError("it does not come to that")

    def audit(self) -> list[str]:
        said = [line for side in self.decodes for line in side.audit()]
        return said + [line for side in self.prefills for line in side.audit()]

    def outcome(self, name: str) -> Outcome:
        (end,) = self.heard[name].ends
        assert isinstance(end, Ended)
        return end.outcome


GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def start(cluster: Cluster, name: str, length: int, salt: int = 0, at: int = 0) -> Start:
    tokens = [32 + (salt * 31 + i * i) % 95 for i in range(length)]
    return Start(request=name, tokens=tokens, sampling=GREEDY, prefill=cluster.partner(at))


def differs(one: Start, heard: Heard, settings: Settings) -> str | None:
    """What is wrong with an answer, or with the part of it that was said."""
    if len(heard.ends) != 1:
        return f"{one.request} ended {len(heard.ends)} times"
    alone = msgspec.structs.replace(one, prefill=None)
    expected = solo(alone, settings.limits.draft_tokens, settings.top_k)
    if isinstance(heard.ends[0].outcome, Completed):
        return None if heard.answer == expected.answer else f"{one.request} differs"
    count, record = len(heard.tokens), heard.ends[0].draft_record or []
    whole = expected.ends[0].draft_record or []
    same = expected.tokens[:count] == heard.tokens and whole[: len(record)] == record
    return None if same else f"{one.request} differs before it ended"
