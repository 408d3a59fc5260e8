"""`stanchion bench gateway`: what the gateway adds to a stream, and what it can carry.

Processes of their own: a stub that answers by a script in vLLM's words (see `streams`), our gateway
in front of it (`stanchion gateway`, balanced: every token goes through the monitor), and, where
`--peers FOLDER` has one (`runs/gateway_peers.sh`), a router written in Rust in front of the same
stub. The client is this process.

*Added* is what a request takes through the gateway less what it takes from the stub itself, at one
pace: half of the streams a second that the gateway can carry, 32 streams' worth at once at most.
A chunk's time is from when the stub sent it to when the client had it. *Streams a core*: streams as
fast as 32 clients get them, over the CPU seconds that gateway or router used for them.

Sizes are fixed here.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from stanchion.cli.bench.measure import Measure
from stanchion.cli.bench.processes import Running, free_port, gateway, opened, running, stub
from stanchion.cli.bench.streams import MODEL
from stanchion.core.errors import ConfigError
from stanchion.lab.stats import percentile

CLIENTS = 32
PROMPT = "{number} words of a prompt that is short, so that what is measured is the stream"
ROUTER = "bin/sglang-router"


@dataclass(frozen=True)
class Sizes:
    """`chunks`: of an answer. `paced`: streams of a block; `blocks`: of each side."""

    chunks: int
    first_ms: float
    gap_ms: float
    carried: int  # streams of a block that goes as fast as it can
    carried_blocks: int
    paced: int
    paced_blocks: int


FULL = Sizes(64, 20.0, 10.0, 600, 5, 300, 7)
QUICK = Sizes(16, 20.0, 10.0, 100, 2, 60, 2)


@dataclass
class Block:
    """Of one side. `ttft_s` from the client's send to its first chunk, less what the stub waited;
    `chunk_s`: of each chunk, from the stub's send to the client."""

    ttft_s: list[float] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, model_folder: Path, sizes: Sizes, peers: Path | None) -> None:
        self._model_folder = model_folder
        self._sizes = sizes
        self._router = None if peers is None else peers / ROUTER
        self._asked = 0
        self.measures: dict[str, Callable[[], Measure]] = {
            "streams_a_core": self.streams,
            "streams_over_rust_router": self.over_router,
            "added_ttft_p50_ms": partial(self.added_ttft, "added_ttft_p50_ms", 0.5, 3.0, 2.0),
            "added_ttft_p99_ms": partial(self.added_ttft, "added_ttft_p99_ms", 0.99, None, 10.0),
            "added_chunk_ms": self.added_chunk,
        }

    def prepare(self, names: Sequence[str]) -> None:
        if self._router is not None and not self._router.is_file():
            raise ConfigError(f"{self._router} is not there: runs/gateway_peers.sh makes it")

    # ---- measures ---------------------------------------------------------------------------

    def streams(self) -> Measure:
        """As fast as the clients get them, beside the stub itself."""
        measure = Measure("streams_a_core", "streams a CPU second", "value")
        measure.ours = [streams / cpu for streams, _, cpu in self._carried["gateway"]]
        rates = [streams / took for streams, took, _ in self._carried["gateway"]]
        chunks = self._sizes.chunks
        measure.note = f"{statistics.median(rates):.0f} streams/s of {chunks} chunks, 32 clients"
        return measure

    def over_router(self) -> Measure:
        measure = Measure(
            "streams_over_rust_router", "streams a CPU second", "rate", gate=0.1, aim=0.2
        )
        if "router" not in self._carried:
            measure.note = "no --peers: runs/gateway_peers.sh installs the router"
            return measure
        measure.ours = [streams / cpu for streams, _, cpu in self._carried["gateway"]]
        measure.other = [streams / cpu for streams, _, cpu in self._carried["router"]]
        measure.note = "beside sglang-router, round robin, in front of the same stub"
        return measure

    def added_ttft(self, name: str, share: float, gate: float | None, aim: float) -> Measure:
        measure = Measure(name, "ms", "value", gate=gate, aim=aim, at_least=False)
        for ours, direct in self._paced:
            edges = [percentile(one.ttft_s, share) or 0.0 for one in (ours, direct)]
            measure.ours.append(1000 * (edges[0] - edges[1]))
        measure.note = self._pace_words
        return measure

    def added_chunk(self) -> Measure:
        measure = Measure("added_chunk_ms", "ms", "value", aim=0.2, at_least=False)
        for ours, direct in self._paced:
            medians = [statistics.median(one.chunk_s) for one in (ours, direct)]
            measure.ours.append(1000 * (medians[0] - medians[1]))
        measure.note = self._pace_words
        return measure

    @property
    def _pace_words(self) -> str:
        blocks, paced = self._sizes.paced_blocks, self._sizes.paced
        words = "at most half of what it carries, and 32 at once"
        return f"{self._pace:.1f} streams/s ({words}); {blocks} blocks of {paced}"

    # ---- runs -------------------------------------------------------------------------------

    @cached_property
    def _carried(self) -> dict[str, list[tuple[int, float, float]]]:
        """By side: of each block, streams, seconds and CPU seconds."""
        sizes = self._sizes
        found: dict[str, list[tuple[int, float, float]]] = {}
        with self._servers(0.0, 0.0, sizes.carried * 2 * (sizes.carried_blocks + 1)) as servers:
            sides = {name: one for name, one in servers.items() if name != "direct"}
            for round_ in range(sizes.carried_blocks + 1):
                for name, one in sides.items():
                    before, began = one.cpu_s(), time.monotonic()
                    asyncio.run(self._fast(one.url))
                    took, cpu = time.monotonic() - began, one.cpu_s() - before
                    if round_:  # the first warms up
                        found.setdefault(name, []).append((sizes.carried, took, cpu))
        return found

    @cached_property
    def _pace(self) -> float:
        """Streams a second: half of what the gateway carries, and no more than 32 at once."""
        sizes = self._sizes
        rate = statistics.median(streams / took for streams, took, _ in self._carried["gateway"])
        lasts = (sizes.first_ms + sizes.gap_ms * sizes.chunks) / 1000
        return min(rate / 2, CLIENTS / lasts)

    @cached_property
    def _paced(self) -> list[tuple[Block, Block]]:
        """Pairs of blocks: through the gateway, and direct."""
        sizes, pace = self._sizes, self._pace
        found: list[tuple[Block, Block]] = []
        rows = sizes.paced * 2 * (sizes.paced_blocks + 1)
        with self._servers(sizes.first_ms, sizes.gap_ms, rows) as servers:
            for round_ in range(sizes.paced_blocks + 1):
                order = ("gateway", "direct") if round_ % 2 else ("direct", "gateway")
                said = {name: asyncio.run(self._slow(servers[name].url, pace)) for name in order}
                if round_:
                    found.append((said["gateway"], said["direct"]))
        return found

    async def _fast(self, url: str) -> None:
        """All streams of a block, as 32 clients get them."""
        left = iter(range(self._sizes.carried))

        async def client(session: aiohttp.ClientSession) -> None:
            for _ in left:
                await self._one(session, url, Block())

        async with opened() as session, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(session))

    async def _slow(self, url: str, pace: float) -> Block:
        """Streams at even times, each of them sent at its time."""
        block, loop = Block(), asyncio.get_running_loop()
        async with opened() as session, asyncio.TaskGroup() as group:
            began = loop.time() + 0.1
            for at in range(self._sizes.paced):
                due = began + at / pace

                async def later(due: float = due) -> None:
                    await asyncio.sleep(max(0.0, due - loop.time()))
                    await self._one(session, url, block)

                group.create_task(later())
        return block

    async def _one(self, session: aiohttp.ClientSession, url: str, block: Block) -> None:
        number = self._asked
        self._asked += 1
        body = {
            "model": MODEL,
            "prompt": PROMPT.format(number=number),
            "max_tokens": 3 * self._sizes.chunks,
            "temperature": 0.7,
            "stream": True,
        }
        arrived: list[float] = []
        began = time.monotonic()
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise ConfigError(f"{url}: {reply.status} {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {") and b'"text"' in line:
                    arrived.append(time.monotonic())
        sent = self._log[number]
        if not sent.all():
            raise ConfigError(f"the stub did not send all of {number}")
        block.ttft_s.append(arrived[0] - began - self._first_s)
        # A gateway may join chunks: each is compared with the last that was sent before it came.
        block.chunk_s.extend(
            at - sent[max(0, int(np.searchsorted(sent, at)) - 1)] for at in arrived[:-1]
        )

    # ---- processes --------------------------------------------------------------------------

    @contextmanager
    def _servers(
        self, first_ms: float, gap_ms: float, requests: int
    ) -> Iterator[dict[str, Running]]:
        self._asked, self._first_s = 0, first_ms / 1000
        chunks = self._sizes.chunks
        with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as folder, ExitStack() as stack:
            log = Path(folder) / "sent"
            direct = stack.enter_context(stub(log, requests, chunks, first_ms, gap_ms))
            self._log: NDArray[np.float64] = np.memmap(
                log, np.float64, "r", shape=(requests, chunks)
            )
            ours = gateway(direct.url, self._model_folder)
            servers = {"direct": direct, "gateway": stack.enter_context(ours)}
            if self._router is not None:
                theirs = free_port()
                command = [str(self._router.parent / "python"), "-m", "sglang_router.launch_router"]
                command += ["--worker-urls", direct.url, "--port", f"{theirs}"]
                command += ["--policy", "round_robin", "--prometheus-port", f"{free_port()}"]
                servers["router"] = stack.enter_context(running(command, theirs))
            yield servers
