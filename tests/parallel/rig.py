"""Several ranks in one process: a thread each, real collectives between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist

from stanchion.device.cpu import InlineQueue, ThreadQueue
from stanchion.device.stream import Stream
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.ranks import FEW, Ranks, follow
from stanchion.engine.scheduler import Limits
from stanchion.kv.store import Store
from stanchion.model.hashed import END_TOKEN
from stanchion.model.text import Model
from stanchion.parallel.group import GlooGroup
from stanchion.parallel.split import Rank, Split

TIMEOUT_S = 30.0


@dataclass
class Followers:
    """Ranks 1 and up. `stores` are their pools, in the order of rank."""

    model: Model
    pages: int
    stores: dict[int, Store] = field(default_factory=dict)
    failed: list[BaseException] = field(default_factory=list)
    inboxes: list[SimpleQueue[bytes | None]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def send(self, order: bytes | None) -> None:
        for inbox in self.inboxes:
            inbox.put(order)

    def run(self, rank: int, ranks: Ranks, inbox: SimpleQueue[bytes | None]) -> None:
        stream = Stream("compute", InlineQueue())
        store = self.stores[rank] = Store(ranks.schema(self.model.schema), self.pages)
        side = ranks.side(self.model, store, stream)
        try:
            with torch.inference_mode():
                follow(side, store, iter(inbox.get, None))
        except BaseException as error:  # noqa: BLE001  the edge of a thread: the test hears of it
            self.failed.append(error)


@contextmanager
def ranked(
    model: Model,
    count: int,
    split: Split = "zigzag",
    layer_split: bool = False,
    limits: Limits | None = None,
    pages: int = 512,
    failpoints: tuple[str, ...] = (),
    slow_s: float = 0.0,
    few: int = FEW,
) -> Iterator[tuple[Parts, Followers]]:
    meeting = dist.HashStore()
    queues: list[ThreadQueue] = []

    def ranks(rank: int) -> Ranks:
        exchange = GlooGroup("exchange", Rank(rank), count, meeting, TIMEOUT_S)
        if not layer_split:
            return Ranks(exchange, split, few=few)
        broadcast = GlooGroup("broadcast", Rank(rank), count, meeting, TIMEOUT_S)
        queue = ThreadQueue(f"broadcast {rank}")
        queues.append(queue)
        return Ranks(
            exchange, split, broadcast, queue, frozenset(failpoints), slow_s, time.sleep, few
        )

    followers = Followers(model, pages)
    followers.inboxes = [SimpleQueue() for _ in range(1, count)]

    def life(rank: int, inbox: SimpleQueue[bytes | None]) -> None:
        followers.run(rank, ranks(rank), inbox)

    for rank, inbox in enumerate(followers.inboxes, 1):
        thread = threading.Thread(target=life, args=(rank, inbox))
        thread.start()
        followers.threads.append(thread)
    parts = assemble(
        model, limits or Limits(), pages, eos_ids=(END_TOKEN,), record_drafts=True,
        ranks=ranks(0), send=followers.send,
    )  # fmt: skip
    try:
        with torch.inference_mode():
            yield parts, followers
    finally:
        followers.send(None)
        for thread in followers.threads:
            thread.join(TIMEOUT_S)
        for queue in queues:
            queue.close()
    assert followers.failed == []


def kept(stores: list[Store]) -> dict[tuple[int, str], bytes]:
    """All rows of the pool but the null page's, by (layer, buffer), of the rank that keeps them."""
    found: dict[tuple[int, str], bytes] = {}
    stream = Stream("test", InlineQueue())
    for store in stores:
        every = np.arange(store.pages, dtype=np.int32)
        for one in store.schema.buffers:
            with stream.reading(store.behind(one.layer, one.door), every) as view:
                rows = view.rows[one.name][store.schema.page_tokens :]
                said = rows.view(torch.uint8).numpy().tobytes()
            assert found.setdefault((one.layer, one.name), said) == said, "ranks differ"
    return found
