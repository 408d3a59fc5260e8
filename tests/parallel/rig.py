"""Several ranks in one process: a thread each, real collectives between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from stanchion.device.cpu import InlineQueue, ThreadQueue
from stanchion.device.stream import Stream
from stanchion.engine.assemble import Parts, assemble
from stanchion.engine.follower import Follower, Item, Over
from stanchion.engine.orders import Report, encode
from stanchion.engine.others import Others
from stanchion.engine.ranks import FEW, Ranks
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan, compute_stream, copier_of, host_arena
from stanchion.kv.store import Store
from stanchion.model.hashed import END_TOKEN
from stanchion.model.text import Model
from stanchion.parallel.group import GlooGroup
from stanchion.parallel.split import Rank, Split

TIMEOUT_S = 30.0


@dataclass
class Inbox:
    items: SimpleQueue[Item] = field(default_factory=SimpleQueue)

    def take(self) -> Item:
        return self.items.get()

    def at_hand(self) -> list[Item]:
        return [self.items.get() for _ in range(self.items.qsize())]


@dataclass
class Followers:
    """Ranks 1 and up, and what engine/others asks of the way to them. `stores` are their pools."""

    model: Model
    pages: int
    tiers: TierPlan | None = None
    stores: dict[int, Store] = field(default_factory=dict)
    hosts: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # their host memories
    failed: list[BaseException] = field(default_factory=list)
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    reports: SimpleQueue[tuple[int, bytes]] = field(default_factory=SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    came: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return list(self.inboxes)

    def send(self, rank: int, order: bytes) -> None:
        self.inboxes[rank].items.put(order)

    def heard(self) -> list[tuple[int, bytes]]:
        said, self.came = self.came, []
        return said + [self.reports.get() for _ in range(self.reports.qsize())]

    def wait(self) -> None:
        self.came.append(self.reports.get(timeout=TIMEOUT_S))

    def run(self, rank: int, ranks: Ranks) -> None:
        stream = compute_stream(self.model.schema, self.tiers)
        store = self.stores[rank] = Store(ranks.schema(self.model.schema), self.pages)
        side = ranks.side(self.model, store, stream)
        copier = None
        if self.tiers is not None:
            host = host_arena(self.tiers, store.schema)
            self.hosts[rank] = host.memory
            copier = copier_of(self.tiers, store, host)

        def report(said: Report) -> None:
            self.reports.put((rank, encode(said)))

        try:
            with torch.inference_mode():
                Follower(side, store, self.inboxes[rank], report, copier).run()
        except BaseException as error:  # noqa: BLE001  the edge of a thread: the test hears of it
            self.failed.append(error)
        finally:
            if copier is not None:
                copier.close()


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
    tiers: TierPlan | None = None,
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

    followers = Followers(model, pages, tiers, inboxes={one: Inbox() for one in range(1, count)})
    for rank in followers.ranks:
        life = partial(_life, followers, rank, ranks)
        followers.threads.append(threading.Thread(target=life))
        followers.threads[-1].start()
    parts = assemble(
        model, limits or Limits(), pages, eos_ids=(END_TOKEN,), record_drafts=True,
        ranks=ranks(0), others=Others(followers), tiers=tiers,
    )  # fmt: skip
    try:
        with torch.inference_mode():
            yield parts, followers
    finally:
        for inbox in followers.inboxes.values():
            inbox.items.put(Over())
        for thread in followers.threads:
            thread.join(TIMEOUT_S)
        for queue in queues:
            queue.close()
        if parts.engine.tiered is not None:
            parts.engine.tiered.tiers.close()
    assert followers.failed == []


def _life(followers: Followers, rank: int, ranks: Callable[[int], Ranks]) -> None:
    followers.run(rank, ranks(rank))


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
