"""A rank's entry: `python -m stanchion.cli.rank RANK_JSON`. Its worker, rank 0, started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from stanchion.core.config import Config
from stanchion.core.errors import ServeError
from stanchion.device.cpu import InlineQueue, ThreadQueue
from stanchion.device.stream import Stream
from stanchion.engine.ranks import Ranks, follow
from stanchion.kv.store import Store
from stanchion.parallel.group import GlooGroup, RankLost
from stanchion.parallel.split import Rank

TIMEOUT_S = 300.0  # of a collective. A worker that hangs is killed much sooner, by who watches it
PR_SET_PDEATHSIG = 1


class RankPlan(Struct, frozen=True, kw_only=True):
    """`meeting` is a file by which the ranks find each other, `orders` the descriptor on which
    rank 0 says its passes, `parent` its process, `failpoints` those of ranks."""

    rank: int
    pages: int
    meeting: str
    orders: int
    parent: int
    config: Config
    failpoints: list[str]


encode = msgspec.json.encode
_plans = msgspec.json.Decoder(RankPlan)


def meet(rank: int, config: Config, meeting: str, failpoints: frozenset[str]) -> Ranks:
    """Wait for all ranks; raise RankLost if they do not come. Then nobody needs `meeting` more."""
    parallel = config.parallel
    store = dist.FileStore(meeting, parallel.cp)  # type: ignore[attr-defined]

    def group(name: str) -> GlooGroup:
        return GlooGroup(name, Rank(rank), parallel.cp, store, TIMEOUT_S)

    exchange = group("exchange")
    broadcast = group("broadcast") if parallel.layer_split else None
    for root in range(parallel.cp):  # whoever takes part in these has met in all groups
        exchange.broadcast(torch.zeros(1, dtype=torch.uint8), Rank(root))
    if broadcast is None:
        return Ranks(exchange, parallel.split)  # type: ignore[arg-type]  # config.check saw to it
    return Ranks(
        exchange,
        parallel.split,  # type: ignore[arg-type]
        broadcast,
        ThreadQueue("broadcast"),
        failpoints,
        config.lab.slow_broadcast_ms / 1000,
        time.sleep,
    )


def run(plan: RankPlan) -> int:
    """Follow rank 0 until it ends. Return the process's exit code."""
    from stanchion.cli.worker import load_model

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; rank 0 says when it is over
    die_with(plan.parent)
    torch.set_num_threads(plan.config.engine.threads)
    try:
        model, *_ = load_model(plan.config)
        ranks = meet(plan.rank, plan.config, plan.meeting, frozenset(plan.failpoints))
        store = Store(ranks.schema(model.schema), plan.pages)
        side = ranks.side(model, store, Stream("compute", InlineQueue()))
        with torch.inference_mode():
            follow(side, store, _orders(plan.orders))
    except (ServeError, RankLost) as error:
        print(f"stanchion: rank {plan.rank}: {error}", file=sys.stderr)
        return 1
    return 0


def die_with(parent: int) -> None:
    """Be killed by the kernel when `parent` ends, also while stopped or deep in a collective: only
    so is nobody left who could write to memory that others were told is free."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)  # it had ended before


def _orders(descriptor: int) -> Iterator[bytes]:
    with Connection(descriptor, writable=False) as orders:
        while True:
            try:
                yield orders.recv_bytes()
            except EOFError:
                return


if __name__ == "__main__":
    sys.exit(run(_plans.decode(sys.argv[1])))
