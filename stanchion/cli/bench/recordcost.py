"""What recording costs: `record_cost` of `stanchion bench recording`.

Two gateways in front of one stub, in processes of their own; one records (without content, as it
does unless asked). Both carry the same streams as fast as eight clients get them: 64 chunks of
three tokens behind a prompt of about 2,500. The cost is in CPU seconds of the gateway for a block
of streams, in pairs of blocks of which every second begins with the other side.

Two processes that do the same thing differ by up to a tenth; the one that was started first tends
to be the dearer one. So there are several fresh pairs of processes, in every second of which the
recording one is started first, and each pair is one run: the means of its blocks.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stanchion.cli.bench.measure import Measure, paired
from stanchion.cli.bench.processes import Running, gateway, opened, stub
from stanchion.cli.bench.streams import MODEL
from stanchion.core.errors import ConfigError
from stanchion.lab.anonymise.pool import library

CLIENTS = 8
CHUNKS = 64
PROMPT_CHARACTERS = 9_000
GATE = 1.03


@dataclass(frozen=True)
class Sizes:
    streams: int  # of a block
    pairs: int  # of blocks, of each pair of processes
    processes: int  # pairs of them


FULL = Sizes(streams=200, pairs=3, processes=10)
QUICK = Sizes(streams=10, pairs=1, processes=2)


def record_cost(tokenizer: Path, sizes: Sizes) -> Measure:
    means = [
        _means(tokenizer, sizes, recording_first=bool(at % 2)) for at in range(sizes.processes)
    ]
    measure = Measure("record_cost", "CPU s", "bound", gate=GATE, at_least=False)
    measure.ours, measure.other = [ours for ours, _ in means], [other for _, other in means]
    measure.note = f"of the gateway alone, for {sizes.streams} streams; without content"
    return measure


def _means(tokenizer: Path, sizes: Sizes, recording_first: bool) -> tuple[float, float]:
    """CPU seconds for a block: recording, and plain."""
    found, blocks = Measure("block", "CPU s", "cost"), _Blocks(sizes.streams)
    with _sides(tokenizer, sizes, recording_first) as (plain, recording):
        paired(found, lambda: blocks.cpu_s(recording), lambda: blocks.cpu_s(plain), sizes.pairs)
    return statistics.mean(found.ours), statistics.mean(found.other or [])


@contextmanager
def _sides(
    tokenizer: Path, sizes: Sizes, recording_first: bool
) -> Iterator[tuple[Running, Running]]:
    with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        requests = 2 * sizes.streams * (sizes.pairs + 1)
        server = stack.enter_context(stub(folder / "sent", requests, CHUNKS, 0.0, 0.0))
        started: dict[bool, Running] = {}
        for records in (recording_first, not recording_first):
            words = ("--set", f"gateway.record={folder / 'recording'}") if records else ()
            started[records] = stack.enter_context(gateway(server.url, tokenizer, *words))
        yield started[False], started[True]


class _Blocks:
    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._asked = 0
        self._text = library()

    def cpu_s(self, side: Running) -> float:
        before = side.cpu_s()
        asyncio.run(self._block(side.url))
        return side.cpu_s() - before

    async def _block(self, url: str) -> None:
        left = iter(range(self._streams))

        async def client() -> None:
            for _ in left:
                number = self._asked
                self._asked += 1
                at = number * 977 % (len(self._text) - PROMPT_CHARACTERS)
                prompt = f"{number} {self._text[at : at + PROMPT_CHARACTERS]}"
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 3 * CHUNKS, "stream": True}
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    if reply.status != 200:
                        raise ConfigError(f"{url}: {reply.status} {await reply.text()}")
                    await reply.read()

        async with opened() as session, asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
