"""Foreign servers as members of the fleet: found, looked at, lost, and found again.

Promises: a server is in the fleet from the first time that it says what it is to the first time
that it is not there; each time it comes back it is another life, since nobody knows what it has
kept. Servers that do not fit end the gateway at its start and are left out later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from stanchion.core.messages import Hello
from stanchion.gateway import journal
from stanchion.gateway.supervise import Watched
from stanchion.gateway.tokens import Vocabulary
from stanchion.gateway.upstream.client import Patience, Server, session
from stanchion.gateway.upstream.find import FACTS_BYTES, Misfit, aborts, find
from stanchion.gateway.upstream.link import Side, UpstreamLink, Wire
from stanchion.gateway.upstream.place import Place
from stanchion.gateway.upstream.sglang import Sglang
from stanchion.gateway.upstream.text import Text
from stanchion.gateway.upstream.vllm import Vllm
from stanchion.gateway.upstream.wire import Asked, Found, Load, Wrong

METRICS_BYTES = 2**23
LOAD_EVERY = 4  # looks


@dataclass(frozen=True)
class Wanted:
    """`text`: servers are handed text; otherwise ids of `vocabulary`. `watched`: the monitor wants
    log-probabilities. `model`: which of a server's models; empty: its first."""

    vocabulary: Vocabulary
    text: bool
    watched: bool
    model: str = ""
    key: str = field(default="", repr=False)
    patience: Patience = field(default_factory=Patience)


class Upstreams:
    """`running` is what a gateway takes as its `supervise`."""

    def __init__(self, places: Sequence[Place], wanted: Wanted) -> None:
        self._places = places
        self._wanted = wanted
        self._sides: dict[str, Side] = {}
        self._seated: set[str] = set()  # were in the fleet at least once
        self.refused = ""  # why one could not be used at the start

    @asynccontextmanager
    async def running(self, fleet: Watched) -> AsyncIterator[None]:
        fleet.expect([one.name for one in self._places])
        wanted = self._wanted
        async with session(wanted.patience, wanted.key) as made, asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(
                    self._keep(one, Server(made, one.url, wanted.patience), fleet, tasks)
                )
                for one in self._places
            ]
            try:
                yield
            finally:
                for watch in watches:
                    watch.cancel()

    async def _keep(
        self, place: Place, server: Server, fleet: Watched, tasks: asyncio.TaskGroup
    ) -> None:
        """Life after life, until it is cancelled."""
        life = 1
        while True:
            with suppress(Wrong):  # not there, or not yet: it is asked again
                link = await self._seat(place, server, fleet, tasks, life)
                if link is not None:
                    life += 1
                    await self._look(place, server, link)
            await asyncio.sleep(self._wanted.patience.poll_s)

    async def _seat(
        self,
        place: Place,
        server: Server,
        fleet: Watched,
        tasks: asyncio.TaskGroup,
        incarnation: int,
    ) -> UpstreamLink | None:
        """None if it does not fit. Raise Wrong if it is not there."""
        try:
            found = await find(server, place, self._wanted.model, self._wanted.text)
        except Misfit as misfit:
            self._refuse(place, fleet, str(misfit))
            return None
        wire = await self._wire(server, found)
        load = await _load(server, wire) or Load()
        hello = self._hello(place, found, load, incarnation)
        side = Side((hello.name, incarnation), server, place.host, found.bootstrap_port)
        link = UpstreamLink(hello, wire, side, self._sides, tasks)
        link.looked(load)
        if wrong := fleet.seat(hello, link.attach):
            self._refuse(place, fleet, "; ".join(wrong))
            return None
        self._seated.add(place.name)
        journal.write(journal.Line(event="upstream", worker=place.name, outcome="found"))
        return link

    def _refuse(self, place: Place, fleet: Watched, why: str) -> None:
        line = journal.Line(event="upstream", worker=place.name, outcome="refused")
        journal.write(line, logging.ERROR)
        if place.name not in self._seated:
            self.refused = f"upstream {place.name}: {why}"
            fleet.give_up(self.refused)

    async def _wire(self, server: Server, found: Found) -> Wire:
        size, watched = self._wanted.vocabulary.size, self._wanted.watched
        match found.kind:
            case "vllm":
                return Vllm(found.model, size, watched, await aborts(server))
            case "sglang":
                return Sglang(size, watched)
            case "openai":
                return Text(found.model)

    def _hello(self, place: Place, found: Found, load: Load, incarnation: int) -> Hello:
        vocabulary = self._wanted.vocabulary
        size = str(vocabulary.size)
        return Hello(
            name=place.name,
            role=place.role,
            incarnation=incarnation,
            pid=0,
            peer_address=place.url,
            identity={"kind": found.kind, "model": found.model, "vocabulary": size},
            model=found.model,
            revision="",
            schema=found.kind,
            page_tokens=load.page_tokens if load.pages else 1,
            pages=load.pages or found.context_max,
            context_max=found.context_max,
            vocabulary=vocabulary.size,
            draft_tokens=found.draft_tokens,
            eos_ids=vocabulary.eos_ids,
            failpoints=(),
        )

    async def _look(self, place: Place, server: Server, link: UpstreamLink) -> None:
        """Until it is lost. A server that does not answer in time is left to its silence: it may
        be busy with what it was given."""
        patience, looks = self._wanted.patience, 0
        while not link.lost:
            await asyncio.sleep(patience.poll_s)
            looks += 1
            try:
                await server.whole(Asked(link.health), FACTS_BYTES, patience.look_s)
                load = await _load(server, link.wire) if looks % LOAD_EVERY == 0 else None
            except Wrong as wrong:
                if wrong.server == "gone":
                    link.lose("the server is not there")
                if wrong.server == "there":
                    link.looked(None)
            else:
                link.looked(load)
        journal.write(
            journal.Line(event="upstream", worker=place.name, outcome="lost"), logging.WARNING
        )


async def _load(server: Server, wire: Wire) -> Load | None:
    """What its counters say, if it has any: they are no reason to do without it."""
    if wire.metrics is None:
        return None
    try:
        raw = await server.whole(Asked(wire.metrics), METRICS_BYTES, server.patience.look_s)
    except Wrong:
        return None
    return wire.load(raw.decode("utf-8", "replace"))
