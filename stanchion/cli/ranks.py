"""The other ranks of a worker, as its rank 0 sees them: it starts them, and ends when one does."""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from stanchion.cli.rank import RankPlan, encode, meet
from stanchion.core.config import Config
from stanchion.engine.ranks import Ranks
from stanchion.parallel.group import RankLost

STOP_S = 5.0


@dataclass
class Followers:
    """Ranks 1 and up. They hold KV that is nobody else's: one that ends takes the worker along."""

    config: Config
    failpoints: frozenset[str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    orders: list[Connection] = field(default_factory=list)
    closing: bool = False

    def start(self, pages: int) -> Ranks:
        """Start them, and wait until all have met. Raise RankLost if they do not."""
        with tempfile.TemporaryDirectory(prefix="stanchion-ranks-") as folder:
            meeting = os.path.join(folder, "meeting")
            for rank in range(1, self.config.parallel.cp):
                self._spawn(rank, pages, meeting)
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            return meet(0, self.config, meeting, self.failpoints)

    def send(self, order: bytes) -> None:
        for one in self.orders:
            try:
                one.send_bytes(order)
            except OSError as error:
                raise RankLost(f"a rank of this worker hears no more: {error}") from error

    def close(self) -> None:
        self.closing = True
        for one in self.orders:
            one.close()
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, rank: int, pages: int, meeting: str) -> None:
        theirs, ours = multiprocessing.Pipe(duplex=False)
        with theirs:
            plan = RankPlan(
                rank=rank,
                pages=pages,
                meeting=meeting,
                orders=theirs.fileno(),
                parent=os.getpid(),
                config=self.config,
                failpoints=sorted(self.failpoints),
            )
            command = [sys.executable, "-m", "stanchion.cli.rank", encode(plan).decode()]
            self.processes[rank] = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.orders.append(ours)

    def _watch(self) -> None:
        """Until one ends. Rank 0 may be deep in a collective then, where nothing reaches it but the
        end of its process; and the others go when it does."""
        watched = {os.pidfd_open(one.pid): rank for rank, one in self.processes.items()}
        ended, _, _ = select.select([*watched], [], [])
        if not self.closing:
            ranks = ", ".join(str(watched[one]) for one in ended)
            print(f"stanchion: rank {ranks} ended, and so does its worker", file=sys.stderr)
            os._exit(1)
