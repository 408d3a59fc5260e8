"""What recording costs: `record_cost` of `stanchion bench recording`.

Two gateways in front of one stub, in processes of their own; one records (without content, as it
does unless asked). Both carry the same streams as fast as eight clients get them: 64 chunks of
three tokens behind a prompt of about 2,500. The cost is in CPU seconds of the gateway for a block
of streams, in pairs of blocks of which every second begins with the other side.
"""

from __future__ import annotations

import asyncio
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
    pairs: int


FULL = Sizes(streams=200, pairs=15)
QUICK = Sizes(streams=10, pairs=2)


def record_cost(tokenizer: Path, sizes: Sizes) -> Measure:
    measure = Measure("record_cost", "CPU s", "bound", gate=GATE, at_least=False)
    measure.note = f"of the gateway alone, for {sizes.streams} streams; without content"
    with _sides(tokenizer, sizes) as (plain, recording):
        blocks = _Blocks(sizes.streams)
        return paired(
            measure, lambda: blocks.cpu_s(recording), lambda: blocks.cpu_s(plain), sizes.pairs
        )


@contextmanager
def _sides(tokenizer: Path, sizes: Sizes) -> Iterator[tuple[Running, Running]]:
    with tempfile.TemporaryDirectory(prefix="stanchion-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        requests = 2 * sizes.streams * (sizes.pairs + 1)
        server = stack.enter_context(stub(folder / "sent", requests, CHUNKS, 0.0, 0.0))
        words = ("--set", f"gateway.record={folder / 'recording'}")
        yield (
            stack.enter_context(gateway(server.url, tokenizer)),
            stack.enter_context(gateway(server.url, tokenizer, *words)),
        )


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
