"""The engine's loop: hear, land, launch. No clock, no I/O: same messages in, same said out.

    hear    messages become requests or endings, while a flight may still be on the device
    land    what the flight came to becomes tokens; whoever ended meanwhile is skipped
    launch  admit, plan, and start the next flight; the caller sends what was said while it runs

A flight holds its own pins, so a request may end at any moment and its pages stay out of the pool
until the device is done with them. A request ends in one place, `_end`, once.

A request whose prompt another worker computes has its pages from the start, and waits in phase
`receive` for `arrived`: from then on it is like one whose whole prompt was found in the cache.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from stanchion.core.errors import Bug
from stanchion.core.matching import Grammars
from stanchion.core.messages import Abort, Ended, FromWorker, PromptScores, Start, Tokens
from stanchion.core.outcome import Cancelled, Completed, Outcome, Overloaded
from stanchion.core.outcome import OutputSuspect as Suspect
from stanchion.device.stream import Pages
from stanchion.engine.bounds import Served, accepted, cut, refusal
from stanchion.engine.counters import Counters
from stanchion.engine.flight import Landed
from stanchion.engine.grammar import followed
from stanchion.engine.request import NO_PAGES, Request
from stanchion.engine.scheduler import Limits, Piece, plan
from stanchion.engine.tiered import NOTHING, Tiered
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready

TRIES = 4  # requests that do not fit are tried this many a step, oldest first


class Landing(Protocol):
    """A flight's result. `wait` is the only way to it."""

    def wait(self) -> list[Landed]: ...


Tried = Literal["started", "blocked", "fetching"]
Launch = Callable[[Sequence[Piece], list[Pin]], Landing]
Inspect = Callable[[Request], str | None]  # evidence against a request that is about to complete


@dataclass(eq=False)
class Flight:
    landing: Landing
    pins: list[Pin]


@dataclass
class Engine:
    served: Served
    limits: Limits
    pool: PagePool
    tree: PrefixTree
    ready: Ready
    launch: Launch
    failpoints: frozenset[str] = frozenset()
    record_drafts: bool = False
    running: dict[str, Request] = field(default_factory=dict)  # in order of arrival
    waiting: list[Request] = field(default_factory=list)  # in order of arrival
    counters: Counters = field(default_factory=Counters)
    flight: Flight | None = None
    wanting: list[Request] = field(default_factory=list)  # they have pages, and need KV from afar
    inspect: Inspect | None = None
    tiered: Tiered | None = None
    condemned: list[Pages] = field(default_factory=list)  # whoever holds them begins again
    grammars: Grammars | None = None
    _arrivals: int = 0

    @property
    def working(self) -> bool:
        return bool(self.running or self.waiting or self.flight)

    @property
    def busy(self) -> bool:
        return self.working or bool(self.copies)

    @property
    def copies(self) -> int:
        """Copies between tiers that have not ended: they end by themselves, and `step` hears."""
        return 0 if self.tiered is None else self.tiered.tiers.open

    def step(self, heard: Sequence[Start | Abort]) -> list[FromWorker]:
        said = [reply for message in heard for reply in self._hear(message)]
        said += self._land()
        if self.pool.quarantined:
            said += self._give_up()
        self._launch()
        return said

    # ---- from afar --------------------------------------------------------------------------

    def arrived(self, request: Request, cached: int) -> None:
        """All rows of its prompt are in place now, and their watermarks are raised. `cached` of
        its tokens were not computed by anybody."""
        if request.phase != "receive":
            raise Bug(f"KV arrived for {request.name}, which is in phase {request.phase}")
        self.counters.cached_tokens += max(cached - request.cached, 0)
        request.cached = max(request.cached, cached)
        request.computed, request.redo, request.phase = request.length, True, "prefill"

    def fail(self, name: str, outcome: Outcome) -> list[FromWorker]:
        """End a request that cannot go on; nothing if it has ended."""
        request = self.running.get(name) or self._waiting(name)
        return [self._end(request, outcome)] if request else []

    def waits_for_kv(self, name: str) -> bool:
        """Has it not come to computing its answer yet?"""
        one = self.running.get(name) or self._waiting(name)
        return one is not None and not one.generated and one.phase in ("waiting", "receive")

    # ---- hear -------------------------------------------------------------------------------

    def _hear(self, message: Start | Abort) -> list[FromWorker]:
        match message:
            case Start():
                return self._arrive(message)
            case Abort(name, by):
                return self.fail(name, Cancelled(by))

    def _arrive(self, start: Start) -> list[FromWorker]:
        if start.request in self.running or self._waiting(start.request):
            raise Bug(f"two requests are called {start.request}")
        capacity = self._pages_max * self.ready.page_tokens
        refused = refusal(start, self.served, capacity, len(self.waiting), self.limits)
        taken = refused or accepted(start, self.served, self._arrivals + 1, self.grammars)
        if not isinstance(taken, Request):
            return [Ended(request=start.request, outcome=taken)]
        self._arrivals += 1
        insort(self.waiting, taken, key=lambda one: one.arrival)
        return []

    @property
    def _pages_max(self) -> int:
        return self.pool.size - 1 - self.pool.quarantined

    def _give_up(self) -> list[FromWorker]:
        """End what waits for more pages than are left since some were put into quarantine."""
        most = self._pages_max * self.ready.page_tokens
        hopeless = [one for one in self.waiting if one.length_max > most]
        refused = Overloaded("the pages that it needs are in quarantine on this worker", 1.0)
        return [self._end(one, refused) for one in hopeless]

    def _waiting(self, name: str) -> Request | None:
        return next((one for one in self.waiting if one.name == name), None)

    # ---- land -------------------------------------------------------------------------------

    def _land(self) -> list[FromWorker]:
        flight, self.flight = self.flight, None
        if flight is None:
            return self._settle_tiers()
        said: list[FromWorker] = []
        every = flight.landing.wait()
        said += self._settle_tiers()  # before anything is made of what was read
        for landed in every:
            if self.running.get(landed.piece.request.name) is landed.piece.request:
                said += self._settle(landed)  # else it ended while the flight was out
        for pin in flight.pins if "flight_without_pin" not in self.failpoints else []:
            pin.drop()
        return said

    def _settle_tiers(self) -> list[FromWorker]:
        """Whoever holds a page that was loaded wrong begins again, without it."""
        bad = self.tiered.tiers.poll() if self.tiered is not None else NO_PAGES
        bad, self.condemned = np.concatenate([bad, *self.condemned]), []
        if not len(bad):
            return []
        self.tree.forget(bad)
        self.counters.suspect += 1
        said: list[FromWorker] = []
        for request in [one for one in self.running.values() if np.isin(one.pages, bad).any()]:
            if request.phase == "receive":  # a peer writes behind what it has
                said.append(self._end(request, Suspect("a page that it holds is bad")))
            else:
                self._preempt(request)
        return said

    def _settle(self, landed: Landed) -> list[FromWorker]:
        piece, request = landed.piece, landed.piece.request
        if (failed := landed.failed) is not None:
            self.counters.suspect += isinstance(failed, Suspect)
            return [self._end(request, failed)]
        done = piece.first + piece.count == request.prefill_end
        said: list[FromWorker] = []
        if (found := landed.scores) is not None:
            request.scored += len(found.logprobs)
            said.append(PromptScores(request=request.name, logprobs=found.logprobs, top=found.top))
        reason: Outcome | None = None
        kept = 0
        if landed.chosen is not None:
            kept, reason = cut(request, landed.chosen.tokens)
            said.append(self._say(landed, kept))
            reason = reason or followed(request, landed.chosen.tokens)
        self._advance(landed, kept)
        if not piece.decodes:
            self.counters.prefill_tokens += piece.count
            request.phase = "decode" if done else "prefill"
            if done and not request.sampling.max_tokens:
                reason = Completed("length")  # nothing but the prompt was asked for
        if reason is not None:
            evidence = self.inspect(request) if self.inspect else None
            self.counters.suspect += evidence is not None
            said.append(self._end(request, Suspect(evidence) if evidence else reason))
        return said

    def _say(self, landed: Landed, kept: int) -> Tokens:
        """Take the kept tokens into the request and its counters; say them."""
        request, chosen = landed.piece.request, landed.chosen
        assert chosen is not None
        tokens = chosen.tokens[:kept]
        request.tokens[request.length : request.length + kept] = tokens
        request.length += kept
        self.counters.decode_tokens += kept
        if landed.piece.drafts:
            accepted = min(chosen.accepted, kept)
            request.verify_steps += 1
            request.verified += kept
            request.proposed += landed.piece.drafts
            request.accepted += accepted
            self.counters.verify_steps += 1
            self.counters.proposed += landed.piece.drafts
            self.counters.accepted += accepted
        if self.record_drafts and landed.piece.decodes:
            request.record.append((landed.drafts, chosen.accepted))
        return Tokens(
            request=request.name,
            tokens=tokens,
            logprobs=chosen.logprobs[:kept],
            top=None if request.sampling.logprobs is None else chosen.top[:kept],
            cached_tokens=request.cached,
            spec=request.spec,
        )

    def _advance(self, landed: Landed, kept: int) -> None:
        """The flight's certain rows are in place now; publish the pages that they complete."""
        piece, request = landed.piece, landed.piece.request
        certain = kept if piece.decodes else piece.count
        request.computed = piece.first + certain
        request.redo = False
        if piece.count > certain and "watermark_not_lowered" not in self.failpoints:
            page_tokens = self.ready.page_tokens
            first = request.computed // page_tokens
            last = (piece.first + piece.count - 1) // page_tokens
            places = np.arange(first, last + 1)
            above = (request.computed - places * page_tokens).astype(np.int32)
            pages = request.pages[places]
            self.ready.lower_to(pages, np.maximum(above, 0), np.maximum(above + 1, 0))
        request.ahead = landed.ahead
        self._publish(request)

    def _publish(self, request: Request) -> None:
        """Share every further page that is complete in all layers and whose tokens are known."""
        whole = request.length // self.ready.page_tokens
        if whole <= request.published:
            return
        complete = self.ready.complete(request.pages[request.published : whole])
        count = request.published + int(np.argmin(np.append(complete, False)))
        if count > request.published:
            self._share(request, count)

    def _share(self, request: Request, count: int) -> None:
        tokens = request.tokens[: count * self.ready.page_tokens]
        request.keys = self.tree.keys(request.root, tokens, request.keys)
        first, keys = request.published, request.keys[:count]
        known = self.tree.publish(request.root, keys, tokens, request.pages, first)
        if len(known):
            request.pins.insert(0, self.pool.regrip(known, request.name))
        request.published = count
        if self.tiered is not None:
            self.tiered.published(request, first)

    # ---- launch -----------------------------------------------------------------------------

    def _launch(self) -> None:
        self._admit()
        if self.tiered is not None:
            self.tiered.tiers.submit()  # with no flight too: what waits for a peer has loads
        for request in list(self.running.values()):
            if request.phase == "decode":
                ahead = request.drafts(self.limits.draft_tokens)
                self._make_room(request, request.length + ahead + 1)
        pieces = plan(list(self.running.values()), self.limits)
        if not pieces:
            return
        pins = self._pins_of(pieces)
        self.counters.steps += 1
        self.flight = Flight(self.launch(pieces, pins), pins)

    def _pins_of(self, pieces: Sequence[Piece]) -> list[Pin]:
        """The flight's own: a request may end, and drop its pins, while the flight is out."""
        held = [pin for one in pieces for pin in one.request.pins]
        if "flight_without_pin" in self.failpoints:
            return held
        return [pin.share(f"flight of {pin.holder}") for pin in held]

    def _admit(self) -> None:
        """Start requests, oldest first. Each gets all pages that its known tokens need, or none:
        nobody holds pages while waiting for more to start with. A request that does not fit yet
        may be overtaken by smaller ones, a bounded number of times."""
        blocked: list[Request] = []
        for request in list(self.waiting):
            if len(self.running) >= self.limits.running_max or len(blocked) == TRIES:
                return
            if any(one.overtaken >= self.limits.overtakes_max for one in blocked):
                return
            tried = self._try_start(request)
            if tried == "started":
                for one in blocked:
                    one.overtaken += 1
            elif tried == "blocked":
                blocked.append(request)

    def _try_start(self, request: Request) -> Tried:
        page_tokens = self.ready.page_tokens
        if self.pool.available + self.tree.evictable < request.lacks:
            return "blocked"  # nothing has changed since it did not fit: spare it the look-up
        request.keys = self.tree.keys(request.root, request.tokens[: request.length], request.keys)
        shared = self._hit(request)
        found = NOTHING if self.tiered is None else self.tiered.find(request, len(shared))
        if found is None:
            return "fetching"
        needed = -(-min(request.length + 1, len(request.tokens)) // page_tokens) - len(shared)
        pins = found.pins[:]
        if len(shared) and "hit_without_pin" not in self.failpoints:
            pins.append(self.pool.regrip(shared, request.name))  # before eviction can take them
        spare = len(self.running)  # a page for each that decodes, or they would soon push it out
        if not self._free_up(needed + spare):
            for pin in pins:
                pin.drop()
            request.lacks = needed + spare
            return "blocked"
        own = self.pool.take(needed, request.name)
        self.ready.reset(own.pages)
        request.pins = [*pins[len(found.pins) :], own]
        request.pages = np.concatenate([shared, own.pages])
        request.generations = self.pool.generations[request.pages]
        request.computed = (len(shared) + len(found)) * page_tokens
        request.published = len(shared)
        if self.tiered is not None:
            self.tiered.lift(request, found, own.pages[: len(found)])
        if len(found):
            self._share(request, request.published + len(found))
        request.redo = request.computed > 0
        if not request.generated:
            request.cached = request.computed
            self.counters.cached_tokens += request.cached
        request.phase, request.lacks = "prefill", 0
        missing = request.computed < request.length
        if request.start.prefill is not None and not request.generated and missing:
            request.phase = "receive"
            self.wanting.append(request)
        self.waiting.remove(request)
        self.running[request.name] = request
        self.running = dict(sorted(self.running.items(), key=lambda item: item[1].arrival))
        if "publish_before_complete" in self.failpoints:
            self._share(request, request.length // page_tokens)
        return "started"

    def _hit(self, request: Request) -> Pages:
        """Pages that the tree has. A prompt that wants its own scores is computed whole."""
        if request.wants_scores:
            return NO_PAGES
        pages = request.prefill_end // self.ready.page_tokens
        return self.tree.match(request.keys[:pages], request.tokens)

    def _make_room(self, request: Request, positions: int) -> None:
        """Grow a decoding request's pages; when none can be freed, the youngest gives way."""
        positions = min(positions, len(request.tokens))
        while request.phase == "decode":
            missing = -(-positions // self.ready.page_tokens) - len(request.pages)
            if missing <= 0:
                return
            if self._free_up(missing):
                fresh = self.pool.grow(request.pins[-1], missing)
                self.ready.reset(fresh)
                request.pages = np.concatenate([request.pages, fresh])
                request.generations = np.append(request.generations, self.pool.generations[fresh])
                return
            # Those that wait for KV have nothing to give: a peer may still write to their pages.
            able = (one for one in reversed(self.running.values()) if one.phase != "receive")
            self._preempt(next(able))

    def _free_up(self, pages: int) -> bool:
        """Evict until so many pages are free; if that cannot be, evict nothing."""
        missing = pages - self.pool.available
        if missing > self.tree.evictable:
            return False
        return missing <= 0 or self.tree.evict(missing) == missing

    def _preempt(self, request: Request) -> None:
        """Give all its pages back and let it wait again, in its old place. What it has said stays
        said: its tokens and counters are kept, and its rows are computed again."""
        del self.running[request.name]
        self._let_go(request)
        request.phase = "waiting"
        self.counters.preempted += 1
        insort(self.waiting, request, key=lambda one: one.arrival)

    # ---- end --------------------------------------------------------------------------------

    def _end(self, request: Request, outcome: Outcome) -> Ended:
        """The one place where a request ends, for whatever reason."""
        if request.phase == "ended":
            raise Bug(f"{request.name} ends twice")
        if self.running.pop(request.name, None) is None:
            self.waiting.remove(request)
        self._let_go(request)
        if self.tiered is not None:
            self.tiered.tiers.forget(request.name)
        request.phase = "ended"
        request.end(outcome)
        return Ended(
            request=request.name,
            outcome=outcome,
            generated=request.generated,
            cached_tokens=request.cached,
            spec=request.spec,
            draft_record=request.record if self.record_drafts else None,
        )

    def _let_go(self, request: Request) -> None:
        for pin in request.pins:
            pin.drop()
        request.pins, request.pages = [], NO_PAGES
        request.ahead, request.computed, request.published = None, 0, 0

    def audit(self) -> list[str]:
        """With nothing running: no pin but the tree's, nothing lost, nobody waiting."""
        said = self.pool.audit()
        said += [f"{name} is still running" for name in self.running]
        said += [f"{one.name} is still waiting" for one in self.waiting]
        kept = self.tree.pages + self.pool.quarantined
        if not self.busy and self.pool.available + kept != self.pool.size - 1:
            said.append(
                f"{self.pool.available} free pages, {self.tree.pages} cached and "
                f"{self.pool.quarantined} in quarantine are not all of {self.pool.size - 1}"
            )
        return said + (self.tiered.tiers.audit() if self.tiered is not None else [])
