"""What long prompts do to those who are being answered: real processes, one cluster or the other.

Clients decode while prompts keep arriving at a fixed rate. The figure is the time between two
arrivals of one client's tokens, at its 99th percentile over all clients; tokens that arrive
together are one arrival.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stanchion.cli.bench.measure import Measure
from stanchion.cli.drive import Answer, ask, cluster
from stanchion.core.config import Cluster, Config
from stanchion.core.errors import Bug
from stanchion.core.messages import Start
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.gateway.fleet import Fleet

PERCENTILE = 99


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    clients: int
    client_prompt: int
    client_tokens: int
    prompt: int  # of those that keep arriving
    every_s: float
    repeats: int


@dataclass
class Storm:
    sizes: Sizes
    corpus: Sequence[int]
    measure: Measure
    waits_s: list[float] = field(default_factory=list)  # of the long prompts, in the last run
    _names: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> Measure:
        asyncio.run(self._compare())
        return self.measure

    async def _compare(self) -> None:
        """Both clusters are there all the time; the one that is not asked is idle."""
        pair, unified = (
            Config(cluster=Cluster(prefill=1, decode=1)),
            Config(cluster=Cluster(both=2)),
        )
        other = self.measure.other = []
        async with cluster(pair) as ours, cluster(unified) as theirs:
            for warm in (ours, theirs):
                await self._gap_s(warm.fleet)
            waits: tuple[list[float], list[float]] = [], []
            for _ in range(self.sizes.repeats):
                self.measure.ours.append(await self._gap_s(ours.fleet))
                waits[0].extend(self.waits_s)
                other.append(await self._gap_s(theirs.fleet))
                waits[1].extend(self.waits_s)
        said = [f"{np.median(one):.2f} s of {len(one)}" if one else "none" for one in waits]
        self.measure.note += f"; the long prompts answered took {said[0]}, beside {said[1]}"

    async def _gap_s(self, fleet: Fleet) -> float:
        sizes, self.waits_s = self.sizes, []
        async with asyncio.TaskGroup() as group:
            arrivals = group.create_task(self._arrivals(fleet))
            async with asyncio.TaskGroup() as tasks:
                starts = [
                    self._start(sizes.client_prompt, sizes.client_tokens)
                    for _ in range(sizes.clients)
                ]
                asked = [tasks.create_task(ask(fleet, start)) for start in starts]
            arrivals.cancel()
        await _until_idle(fleet)
        answers = [one.result() for one in asked]
        gaps = np.concatenate([_gaps(one) for one in answers])
        return float(np.percentile(gaps, PERCENTILE))

    async def _arrivals(self, fleet: Fleet) -> None:
        """At a fixed rate, whatever becomes of them, until this is cancelled: then all leave."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._long(fleet))
                due += self.sizes.every_s
                await asyncio.sleep(due - loop.time())

    async def _long(self, fleet: Fleet) -> None:
        began = asyncio.get_running_loop().time()
        await ask(fleet, self._start(self.sizes.prompt, 1))
        self.waits_s.append(asyncio.get_running_loop().time() - began)

    def _start(self, prompt: int, tokens: int) -> Start:
        """No two have a prompt in common, so nobody finds one in a cache."""
        number = next(self._names)
        first = (number * 7919) % (len(self.corpus) - prompt)
        sampling = Sampling(max_tokens=tokens, temperature=0.7, seed=number, ignore_eos=True)
        return Start(
            request=f"r{number}",
            tokens=list(self.corpus[first : first + prompt]),
            sampling=sampling,
            salt=str(number),
        )


async def _until_idle(fleet: Fleet) -> None:
    """The workers have said the end of all that left: it does not reach into the next run."""
    while len(fleet):
        fleet.changed.clear()
        await fleet.changed.wait()


def _gaps(answer: Answer) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if not isinstance(answer.outcome, Completed):
        raise Bug(f"a client was not answered: {answer.outcome}")
    return np.diff([at for at, _ in answer.arrived])
