"""A rank's entry: `python -m stanchion.cli.rank RANK_JSON`. Its worker, rank 0, started it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import Queue

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from stanchion.cli.settings import SWITCH_S
from stanchion.cli.tiers import tier_plan
from stanchion.core.config import Config
from stanchion.core.errors import ServeError
from stanchion.device.cpu import ThreadQueue
from stanchion.disagg.assemble import lane_of
from stanchion.disagg.check import Mode
from stanchion.engine.follower import Follower, Item, Over, Rang
from stanchion.engine.orders import Report
from stanchion.engine.orders import encode as encode_report
from stanchion.engine.ranks import FEW, Ranks, page_bytes
from stanchion.engine.tierplan import compute_stream, copier_of, host_arena
from stanchion.kv.store import Store
from stanchion.parallel.board import Board, BoardGroup
from stanchion.parallel.group import GlooGroup, Group, RankLost
from stanchion.parallel.split import Rank

TIMEOUT_S = 300.0  # of a collective. A worker that hangs is killed much sooner, by who watches it
PR_SET_PDEATHSIG = 1
ORDERS_MAX = 4096  # many times more than rank 0 says between two layers of a pass


class RankPlan(Struct, frozen=True, kw_only=True):
    """The ranks find each other by `boards` or, with gloo, by the file `meeting`. `orders` and
    `reports` are the descriptors of what rank 0 says and hears, `parent` is its process,
    `failpoints` are those of ranks. `sends`: it writes its layers to decode workers."""

    rank: int
    pages: int
    meeting: str
    orders: int
    reports: int
    parent: int
    config: Config
    failpoints: list[str]
    sends: bool
    boards: list[Board]


encode = msgspec.json.encode
_plans = msgspec.json.Decoder(RankPlan)


def meet(
    rank: int, config: Config, meeting: str, boards: Sequence[Board], failpoints: frozenset[str]
) -> Ranks:
    """Wait for all ranks; raise RankLost if they do not come. Then nobody needs `meeting` more."""
    parallel = config.parallel
    exchange, broadcast = _groups(rank, config, meeting, boards)
    for root in range(parallel.cp):  # whoever takes part in these has met in all groups
        exchange.broadcast(torch.zeros(1, dtype=torch.uint8), Rank(root))
    if broadcast is None:
        return Ranks(exchange, parallel.split)  # type: ignore[arg-type]  # config.check saw to it
    few = 0 if config.lab.rows_to_queries else FEW
    return Ranks(
        exchange,
        parallel.split,  # type: ignore[arg-type]
        broadcast,
        ThreadQueue("broadcast"),
        failpoints,
        config.lab.slow_broadcast_ms / 1000,
        time.sleep,
        few,
    )


def _groups(
    rank: int, config: Config, meeting: str, boards: Sequence[Board]
) -> tuple[Group, Group | None]:
    names = ["exchange", "broadcast"] if config.parallel.layer_split else ["exchange"]
    if boards:
        made: list[Group] = [BoardGroup(one, Rank(rank), TIMEOUT_S) for one in boards[: len(names)]]
    else:
        cp = config.parallel.cp
        store = dist.FileStore(meeting, cp)  # type: ignore[attr-defined]
        made = [GlooGroup(name, Rank(rank), cp, store, TIMEOUT_S) for name in names]
    return made[0], made[1] if len(made) > 1 else None


def run(plan: RankPlan) -> int:
    """Follow rank 0 until it ends. Return the process's exit code."""
    from stanchion.cli.worker import load_model

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; rank 0 says when it is over
    die_with(plan.parent)
    config = plan.config
    torch.set_num_threads(config.engine.threads)
    try:
        model, *_ = load_model(config)
        each = page_bytes(model.schema, config.parallel.cp, config.parallel.layer_split)
        tiers = tier_plan(config, f"rank {plan.rank}", model.schema, each)
        ranks = meet(plan.rank, config, plan.meeting, plan.boards, frozenset(plan.failpoints))
        store = Store(ranks.schema(model.schema), plan.pages)
        side = ranks.side(model, store, compute_stream(model.schema, tiers))
        lane, bell = None, None
        if plan.sends:
            check: Mode = config.kv.check  # type: ignore[assignment]  # config.check saw to it
            slow_ms = config.lab.slow_transfer_ms
            lane, bell = lane_of(store, side.compute, check, config.cluster.transport, slow_ms)
        if tiers is not None or plan.sends:
            sys.setswitchinterval(SWITCH_S)
        copier = None
        if tiers is not None:
            copier = copier_of(tiers, store, host_arena(tiers, store.schema))
        inbox, reports = Inbox(plan.orders, bell), Reports(plan.reports)
        with torch.inference_mode():
            Follower(side, store, inbox, reports.say, copier, lane).run()
    except (ServeError, RankLost) as error:
        print(f"stanchion: rank {plan.rank}: {error}", file=sys.stderr)
        return 1
    return 0


class Inbox:
    """A thread reads what rank 0 says: so rank 0, amid a pass, never stands still for a rank that
    waits for it in that pass. One that is far behind does slow it down. `bell` is readable when a
    write of ours has ended."""

    def __init__(self, orders: int, bell: int | None) -> None:
        self._items: Queue[Item] = Queue(ORDERS_MAX)
        args = (Connection(orders, writable=False), bell)
        threading.Thread(target=self._read, args=args, name="orders", daemon=True).start()

    def take(self) -> Item:
        return self._items.get()

    def at_hand(self) -> list[Item]:
        return [self._items.get() for _ in range(self._items.qsize())]

    def _read(self, orders: Connection, bell: int | None) -> None:
        with orders, select.epoll() as poll:
            poll.register(orders, select.EPOLLIN)
            if bell is not None:
                poll.register(bell, select.EPOLLIN | select.EPOLLET)  # once for each ring
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == bell:
                        self._items.put(Rang())
                        continue
                    try:
                        self._items.put(orders.recv_bytes())
                    except EOFError:
                        self._items.put(Over())
                        return


class Reports:
    """What threads of this process say, whole and in order."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = Connection(descriptor, readable=False)
        self._lock = threading.Lock()

    def say(self, report: Report) -> None:
        frame = encode_report(report)
        with self._lock:
            try:
                self._pipe.send_bytes(frame)
            except OSError:  # rank 0 has ended, and this process is about to
                return


def die_with(parent: int) -> None:
    """Be killed by the kernel when `parent` ends, also while stopped or deep in a collective: only
    so is nobody left who could write to memory that others were told is free."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)  # it had ended before


if __name__ == "__main__":
    sys.exit(run(_plans.decode(sys.argv[1])))
