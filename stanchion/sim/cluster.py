"""A whole cluster in one process: real engines, handoffs and router; simulated time, wire, memory.

Everything that may happen next is one pick: a worker takes a step, a frame arrives (late, twice or
never), a write lands, a client leaves, a worker stops, goes on or is killed, time passes. So a run
is the list of its picks, and a seed replays it.

With `rdma` writes go on while their process is stopped and after its end, until the fence; without,
the process itself copies, and takes what it has not copied along. With `fences` a decode worker can
shut a living peer out, whose writes then fail; without, the end of the peer is the fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from stanchion.core.messages import (
    Abort,
    Ended,
    FromWorker,
    Partner,
    Start,
    Suspected,
    Tokens,
)
from stanchion.core.outcome import Completed, Outcome, PeerLost
from stanchion.core.request import Sampling
from stanchion.disagg.check import Check
from stanchion.disagg.decode import DecodeSide
from stanchion.disagg.peer import Times
from stanchion.disagg.prefill import PrefillSide
from stanchion.disagg.words import decode_from_decode, decode_from_prefill, encode
from stanchion.engine.bounds import Served
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.gateway.router import Life, Route, Router, Standing, reason_to_retry
from stanchion.kv.pages import PagePool
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready
from stanchion.kv.transfer.words import WriteEnded
from stanchion.sim.choices import Choices
from stanchion.sim.device import LAYERS, VOCABULARY, Device, Memory, answer, schema
from stanchion.sim.transport import Flying, Lane, Pool

TIMES = Times(beat_s=0.5, silence_s=4.0, drain_s=40.0, deadline_s=30.0)
IDENTITY = {"model": "simulated"}
SUSPECT_S = 1.5


@dataclass(frozen=True)
class Plan:
    """What a run is. Of troubles: one in so many turns, 0 for never."""

    requests: int = 60
    prefills: int = 2
    decodes: int = 2
    pages: int = 40
    page_tokens: int = 4
    chunk_tokens: int = 12
    rdma: bool = False
    fences: bool = False
    leaves: int = 150
    stops: int = 1000
    kills: int = 2500
    losses: int = 20
    repeats: int = 20
    strays: int = 0  # one in so many writes fails by itself
    failpoints: tuple[str, ...] = ()
    time_is_evidence: bool = False  # an old machine: a silent peer counts as one that has ended


@dataclass(eq=False)
class Worker:
    """One life of a worker."""

    name: str
    side: PrefillSide | DecodeSide
    memory: Memory
    stopped: bool = False
    alive: bool = True
    heard: list[Start | Abort] = field(default_factory=list)
    said: list[FromWorker] = field(default_factory=list)

    @property
    def life(self) -> Life:
        return self.name, self.side.incarnation


@dataclass(eq=False)
class Asked:
    """A request, as its client and the gateway know it."""

    start: Start
    route: Route | None = None
    attempt: str = ""
    retried: bool = False
    tokens: list[int] = field(default_factory=list)
    ends: list[Outcome] = field(default_factory=list)


@dataclass(eq=False)
class Frame:
    prefill: Life
    decode: Life
    to_prefill: bool
    data: bytes


class Cluster:
    def __init__(self, plan: Plan, choices: Choices) -> None:
        self.plan = plan
        self.picks = choices
        self.now = 0.0
        self.router = Router(SUSPECT_S)
        self.flying: list[Flying] = []
        self.wire: list[Frame] = []
        self.asked: dict[str, Asked] = {}
        self.attempts: dict[str, Asked] = {}
        self.counts: dict[str, int] = {}
        self.memories: dict[int, Memory] = {}
        self.ending: list[Worker] = []  # killed, and not yet seen to have ended
        self._numbers = count(1)
        self.workers: dict[str, Worker] = {}
        for at in range(plan.prefills):
            self._begin(f"prefill-{at}")
        for at in range(plan.decodes):
            self._begin(f"decode-{at}")
        self.prefixes = [[choices.pick(VOCABULARY) for _ in range(30)] for _ in range(4)]

    # ---- workers ----------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        plan, number = self.plan, next(self._numbers)
        described = schema(plan.page_tokens)
        pool = PagePool(plan.pages)
        ready = Ready(plan.pages, LAYERS - 1, LAYERS, plan.page_tokens)
        memory = Memory(plan.pages, plan.page_tokens)
        device = Device(memory, pool, ready, lambda: bool(self.picks.pick(2)))
        served = Served("simulated", "", "", VOCABULARY, 1 << 20, ())
        limits = Limits(chunk_tokens=plan.chunk_tokens, running_max=16, draft_tokens=0)
        tree = PrefixTree(pool, plan.page_tokens)
        engine = Engine(served, limits, pool, tree, ready, device.launch)
        check = Check("off", described)
        side: PrefillSide | DecodeSide
        if name.startswith("prefill"):
            lane = Lane(memory, self.memories, self.flying)
            side = PrefillSide(
                engine, IDENTITY, number, [number], "host", lane, check, TIMES.silence_s,
                lambda: next(self._numbers),
            )  # fmt: skip
            device.on_rows = side.rows_ready
        else:
            pool_ = Pool(memory, self.memories, self._numbers, plan.pages, plan.fences)
            side = DecodeSide(
                engine, name, IDENTITY, number, "host", pool_, check, TIMES,
                lambda incarnation, pids: None, frozenset(plan.failpoints),
            )  # fmt: skip
        self.workers[name] = Worker(name, side, memory)

    def step(self, worker: Worker) -> None:
        heard, worker.heard = worker.heard, []
        side = worker.side
        worker.said += side.step(heard, self.now)
        if isinstance(side, PrefillSide):
            for address, word in side.out:
                name, _, number = address.decode().partition("/")
                self._send(Frame(worker.life, (name, int(number)), False, encode(word)))
        else:
            for partner, told in side.out:
                life = partner.name, partner.incarnation
                self._send(Frame(life, worker.life, True, encode(told)))
        side.out.clear()

    def _send(self, frame: Frame) -> None:
        self.wire.append(frame)

    def deliver(self) -> None:
        frame = self.wire.pop(self.picks.pick(len(self.wire)))
        plan = self.plan
        if plan.losses and not self.picks.pick(plan.losses):
            self._count("frames lost")
            return
        if plan.repeats and not self.picks.pick(plan.repeats):
            self._count("frames repeated")
            self.wire.append(frame)
        life = frame.prefill if frame.to_prefill else frame.decode
        worker = self.workers[life[0]]
        if worker.stopped:
            self.wire.append(frame)
        elif frame.to_prefill:
            # A new life is bound to the old address: it must know that it is not meant.
            assert isinstance(worker.side, PrefillSide)
            address = f"{frame.decode[0]}/{frame.decode[1]}".encode()
            worker.side.hear(decode_from_decode(frame.data), address, self.now)
        elif worker.life == life:
            assert isinstance(worker.side, DecodeSide)
            peer = worker.side.peers.get(frame.prefill[1])
            if peer is not None:
                worker.side.hear(peer, decode_from_prefill(frame.data), self.now)

    def land(self) -> None:
        """One write in flight ends, if its transport can go on."""
        one = self.flying.pop(self.picks.pick(len(self.flying)))
        owner = self._owner(one.lane)
        if owner is None and not self.plan.rdma:
            return  # it went with its process
        if owner is not None and owner.stopped and not self.plan.rdma:
            self.flying.append(one)
            return
        write, target = one.write, self.memories.get(one.invited)
        if not one.stray and self.plan.strays and not self.picks.pick(self.plan.strays):
            one.lane.ended.append(WriteEnded(write.number, whole=False, stray=True))
            one.stray = True
            self.flying.append(one)
            self._count("writes strayed")
            return
        if target is None:
            if not one.stray:
                one.lane.ended.append(WriteEnded(write.number, whole=False, stray=True))
            self._count("writes fenced off")
            return
        one.lane.memory.copy_to(
            target, write.layer, write.source, write.destination, write.last_rows
        )
        if not one.stray:
            one.lane.ended.append(WriteEnded(write.number, whole=True))
        self._count("writes")

    def _owner(self, lane: Lane) -> Worker | None:
        for worker in self.workers.values():
            if isinstance(worker.side, PrefillSide) and worker.side.lane is lane:
                return worker
        return None

    def kill(self, worker: Worker) -> None:
        """A new life takes the name at once; the end of the old one is seen later."""
        self._count("kills")
        worker.alive = False
        if isinstance(worker.side, PrefillSide):
            self.ending.append(worker)
            self._begin(worker.name)
        else:
            self._begin(worker.name)
            for asked in list(self.attempts.values()):
                if asked.route is not None and asked.route.worker == worker.life:
                    self._attempt_ended(asked, PeerLost("decode ended"))

    def see_end(self) -> None:
        """Nothing of it is in flight any more, unless the transport is one that must be told."""
        worker = self.ending.pop(self.picks.pick(len(self.ending)))
        assert isinstance(worker.side, PrefillSide)
        lane = worker.side.lane
        if not self.plan.fences:
            self.flying[:] = [one for one in self.flying if one.lane is not lane]
        for other in self.workers.values():
            if isinstance(other.side, DecodeSide):
                other.side.peer_ended(worker.side.incarnation)

    # ---- the gateway ------------------------------------------------------------------------

    def arrive(self) -> None:
        name = f"r{len(self.asked)}"
        prefix = self.prefixes[self.picks.pick(len(self.prefixes))]
        shared = prefix[: self.picks.pick(len(prefix) + 1)]
        tail = [self.picks.pick(VOCABULARY) for _ in range(1 + self.picks.pick(12))]
        sampling = Sampling(max_tokens=1 + self.picks.pick(6), temperature=0.0)
        asked = Asked(Start(request=name, tokens=shared + tail, sampling=sampling))
        self.asked[name] = asked
        if not self._dispatch(asked, name, ()):
            asked.ends.append(PeerLost("no worker is ready"))

    def _dispatch(self, asked: Asked, attempt: str, used: tuple[Life, ...]) -> bool:
        standings = [
            Standing(
                one.life, "prefill" if isinstance(one.side, PrefillSide) else "decode", True,
                2 * SUSPECT_S if one.stopped else 0.0,
            )
            for one in self.workers.values()
        ]  # fmt: skip
        route = self.router.choose(standings, used)
        if route is None or route.prefill is None:
            return False
        self.router.take(attempt, route)
        asked.route, asked.attempt = route, attempt
        self.attempts[attempt] = asked
        partner = Partner(route.prefill[0], route.prefill[0], route.prefill[1])
        start = replace(asked.start, request=attempt, prefill=partner)
        self.workers[route.worker[0]].heard.append(start)
        return True

    def leave(self) -> None:
        open_ = [one for one in self.attempts.values() if not one.ends]
        if open_:
            self._count("clients left")
            asked = open_[self.picks.pick(len(open_))]
            assert asked.route is not None
            worker = self.workers[asked.route.worker[0]]
            if worker.life == asked.route.worker:
                worker.heard.append(Abort(asked.attempt, "client"))

    def hear(self, worker: Worker) -> None:
        said, worker.said = worker.said, []
        for message in said:
            match message:
                case Suspected(_, incarnation):
                    self._count("suspected")
                    self._suspect(incarnation)
                case Tokens(request=request) if request in self.attempts:
                    self.attempts[request].tokens += message.tokens
                case Ended(request=request) if request in self.attempts:
                    self._attempt_ended(self.attempts[request], message.outcome)

    def _suspect(self, incarnation: int) -> None:
        for other in list(self.workers.values()):
            if not self.plan.time_is_evidence:
                if other.side.incarnation == incarnation:
                    self.kill(other)
            elif isinstance(other.side, DecodeSide):
                other.side.peer_ended(incarnation)

    def _attempt_ended(self, asked: Asked, outcome: Outcome) -> None:
        self.router.release(asked.attempt)
        del self.attempts[asked.attempt]
        reason = None if asked.retried or asked.tokens else reason_to_retry(outcome)
        if reason is not None and asked.route is not None:
            asked.retried = True
            if self._dispatch(asked, asked.attempt + ".2", asked.route.lives):
                self._count(f"retries: {reason}")
                return
        asked.ends.append(outcome)
        self._count(type(outcome).__name__)

    # ---- a run ------------------------------------------------------------------------------

    def turn(self) -> None:
        """One thing happens."""
        plan, picks = self.plan, self.picks
        if len(self.asked) < plan.requests and not picks.pick(6):
            self.arrive()
        for chance, what in ((plan.leaves, self.leave), (plan.stops, self._stop)):
            if chance and not picks.pick(chance):
                what()
        if plan.kills and not picks.pick(plan.kills):
            self.kill(self._any())
        if self.ending and not picks.pick(30):
            self.see_end()
        what_next = picks.pick(8)
        if what_next < 3 and self.wire:
            self.deliver()
        elif what_next == 3 and self.flying:
            self.land()
        else:
            worker = self._any()
            if worker.stopped:
                if not picks.pick(60):
                    worker.stopped = False
            else:
                self.step(worker)
                self.hear(worker)
            self.now += 0.02

    def _any(self) -> Worker:
        workers = list(self.workers.values())
        return workers[self.picks.pick(len(workers))]

    def _stop(self) -> None:
        self._count("stops")
        self._any().stopped = True

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def busy(self) -> bool:
        sides = [worker.side for worker in self.workers.values()]
        if len(self.asked) < self.plan.requests or self.attempts or self.ending:
            return True
        return any(side.engine.busy or side.open for side in sides)

    def wrong(self) -> list[str]:
        """What is wrong with a run that has come to its end."""
        said = []
        for name, asked in self.asked.items():
            if len(asked.ends) != 1:
                said.append(f"{name} ended {len(asked.ends)} times")
                continue
            right = answer(asked.start.tokens, asked.start.sampling.max_tokens)
            whole = isinstance(asked.ends[0], Completed)
            if asked.tokens != (right if whole else right[: len(asked.tokens)]):
                said.append(f"{name} got another text than alone")
            if self.router.permits(asked.route.worker if asked.route else ("", 0)):
                said.append(f"{name} left a permit")
        for worker in self.workers.values():
            said += [f"{worker.name}: {line}" for line in worker.side.audit()]
        return said


def run(plan: Plan, choices: Choices, turns_a_request: int = 2000) -> Cluster:
    """Until every request has ended and all are idle. Raise AssertionError if that is never."""
    cluster = Cluster(plan, choices)
    most = plan.requests * turns_a_request
    for _ in range(most):
        if not cluster.busy:
            return cluster
        cluster.turn()
    raise AssertionError(f"{most} turns and no end: {cluster.wrong()[:4]}")
