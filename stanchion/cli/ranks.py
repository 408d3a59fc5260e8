"""The other ranks of a worker, as its rank 0 sees them: it starts them, and ends when one does."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from stanchion.cli.rank import RankPlan, encode, meet
from stanchion.core.config import Config
from stanchion.engine.ranks import Ranks
from stanchion.parallel.board import Board
from stanchion.parallel.group import RankLost

STOP_S = 5.0
REPORTS_BYTES = 2**20  # what a rank may say while rank 0 is deep in a pass


@dataclass
class Followers:
    """Ranks 1 and up. They hold KV that is nobody else's: one that ends takes the worker along.

    `sends`: they write their layers to decode workers.
    """

    config: Config
    failpoints: frozenset[str]
    sends: bool = False
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    orders: dict[int, Connection] = field(default_factory=dict)
    reports: dict[int, Connection] = field(default_factory=dict)
    boards: list[Board] = field(default_factory=list)
    closing: bool = False

    def start(self, pages: int) -> Ranks:
        """Start them, and wait until all have met. Raise RankLost if they do not."""
        parallel = self.config.parallel
        if parallel.collectives == "shm":
            self.boards = [Board.of(parallel.cp) for _ in range(1 + parallel.layer_split)]
        with tempfile.TemporaryDirectory(prefix="stanchion-ranks-") as folder:
            meeting = os.path.join(folder, "meeting")
            for rank in range(1, parallel.cp):
                self._spawn(rank, pages, meeting)
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            return meet(0, self.config, meeting, self.boards, self.failpoints)

    # ---- see engine/others ------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[int]:
        return list(self.orders)

    def send(self, rank: int, order: bytes) -> None:
        try:
            self.orders[rank].send_bytes(order)
        except OSError as error:
            raise RankLost(f"rank {rank} hears no more: {error}") from error

    def heard(self) -> list[tuple[int, bytes]]:
        said = []
        for rank, reports in self.reports.items():
            while reports.poll():
                try:
                    said.append((rank, reports.recv_bytes()))
                except EOFError as error:
                    raise RankLost(f"rank {rank} says no more") from error
        return said

    def wait(self) -> None:
        wait(list(self.reports.values()))

    # ---- processes --------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(one.pid for one in self.processes.values())

    @property
    def descriptors(self) -> list[int]:
        """Each is readable when a rank has something to report."""
        return [one.fileno() for one in self.reports.values()]

    def close(self) -> None:
        self.closing = True
        for one in self.orders.values():
            one.close()
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reports in self.reports.values():
            reports.close()
        for board in self.boards:
            board.close()

    def _spawn(self, rank: int, pages: int, meeting: str) -> None:
        orders, ours = multiprocessing.Pipe(duplex=False)
        back, reports = multiprocessing.Pipe(duplex=False)
        fcntl.fcntl(reports.fileno(), fcntl.F_SETPIPE_SZ, REPORTS_BYTES)
        with orders, reports:
            plan = RankPlan(
                rank=rank,
                pages=pages,
                meeting=meeting,
                orders=orders.fileno(),
                reports=reports.fileno(),
                parent=os.getpid(),
                config=self.config,
                failpoints=sorted(self.failpoints),
                sends=self.sends,
                boards=self.boards,
            )
            command = [sys.executable, "-m", "stanchion.cli.rank", encode(plan).decode()]
            boards = [one for board in self.boards for one in board.descriptors]
            given = [orders.fileno(), reports.fileno(), *boards]
            self.processes[rank] = subprocess.Popen(command, pass_fds=given)
        self.orders[rank], self.reports[rank] = ours, back

    def _watch(self) -> None:
        """Until one ends. Rank 0 may be deep in a collective then, where nothing reaches it but the
        end of its process; and the others go when it does."""
        watched = {os.pidfd_open(one.pid): rank for rank, one in self.processes.items()}
        ended, _, _ = select.select([*watched], [], [])
        if not self.closing:
            ranks = ", ".join(str(watched[one]) for one in ended)
            print(f"stanchion: rank {ranks} ended, and so does its worker", file=sys.stderr)
            os._exit(1)
