"""How writes get to the pools of peers: by this process's transfer, or by those of all ranks.

Under LayerSplit a layer is sent by the rank that keeps it. A handoff is still one, and its machine
is rank 0's: it counts writes, and a write has ended when the rank that made it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from stanchion.core.errors import Bug
from stanchion.disagg.check import DigestsOf
from stanchion.engine.orders import Connect, Connected, Cut, Disconnect, Sent, send_of
from stanchion.engine.others import Others
from stanchion.kv.transfer.words import Invitation, Transfer, TransferError, Write, WriteEnded
from stanchion.parallel.layersplit import Layer, Owners
from stanchion.parallel.split import Rank


class Sends(Protocol):
    def send(self, write: Write) -> None: ...


@dataclass
class TransferLane:
    """A transfer, and the doors of our own pages in front of it. `digests_of` is there where pages
    are checked."""

    transfer: Transfer
    sender: Sends
    page_tokens: int
    digests_of: DigestsOf | None = None
    _digests: dict[int, bytes] = field(default_factory=dict)  # of open writes

    @property
    def bytes_sent(self) -> int:
        return self.transfer.bytes_sent

    def connect(self, peer: int, invitation: Invitation) -> None:
        self.transfer.connect(peer, invitation)

    def disconnect(self, peer: int) -> None:
        self.transfer.disconnect(peer)

    def send(self, write: Write) -> None:
        self.note(write)
        self.sender.send(write)

    def note(self, write: Write) -> None:
        """What its checked pages are, before anything of it is sent."""
        if not len(write.checked):
            return
        if self.digests_of is None:
            raise Bug("digests are asked for where pages are not checked")
        pages, rows = write.source[write.checked], write.rows(self.page_tokens)
        found = self.digests_of(write.layer, pages, rows)
        self._digests[write.number] = found.astype("<u8").tobytes()

    def cut(self, numbers: Sequence[int]) -> None:
        self.transfer.cut(numbers)

    def poll(self) -> list[WriteEnded]:
        return [
            replace(one, digests=self._digests.pop(one.number, b"")) for one in self.transfer.poll()
        ]


@dataclass
class RankedLane:
    """All ranks' lanes as one. `mine` is rank 0's."""

    mine: TransferLane
    others: Others
    owners: Owners
    _answers: dict[int, str] = field(default_factory=dict)  # rank -> why it did not connect
    _open: dict[int, Rank] = field(default_factory=dict)  # write -> who makes it
    _ended: list[WriteEnded] = field(default_factory=list)
    _bytes: dict[int, int] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        self.others.on_connected = self._connected
        self.others.on_sent = self._sent

    @property
    def bytes_sent(self) -> int:
        return self.mine.bytes_sent + sum(self._bytes.values())

    def connect(self, peer: int, invitation: Invitation) -> None:
        """Stand still until all ranks have, or have not: they may have a pass to finish."""
        self.mine.connect(peer, invitation)
        self._answers = {}
        self.others.order_all(Connect(peer, invitation))
        while len(self._answers) < len(self.others.ranks):
            self.others.wait()
        failed = {rank: why for rank, why in self._answers.items() if why}
        if not failed:
            return
        self.mine.disconnect(peer)
        for rank in self.others.ranks:
            if rank not in failed:
                self.others.order(rank, Disconnect(peer))
        raise TransferError("; ".join(f"rank {rank}: {why}" for rank, why in failed.items()))

    def disconnect(self, peer: int) -> None:
        self.mine.disconnect(peer)
        self.others.order_all(Disconnect(peer))

    def send(self, write: Write) -> None:
        owner = self.owners.of_layer(Layer(write.layer))
        if owner == 0:
            self.mine.send(write)
            return
        self._open[write.number] = owner
        self.others.order(owner, send_of(write))

    def cut(self, numbers: Sequence[int]) -> None:
        self.mine.cut([one for one in numbers if one not in self._open])
        for rank in self.others.ranks:
            if theirs := [one for one in numbers if self._open.get(one) == rank]:
                self.others.order(rank, Cut(theirs))

    def poll(self) -> list[WriteEnded]:
        self.others.hear()
        ended, self._ended = [*self.mine.poll(), *self._ended], []
        return ended

    def _connected(self, rank: int, report: Connected) -> None:
        self._answers[rank] = report.error

    def _sent(self, rank: int, report: Sent) -> None:
        if self._open.pop(report.number, None) != rank:
            raise Bug(f"rank {rank} ended write {report.number}, which it was not told to make")
        self._bytes[rank] = report.total
        self._ended.append(
            WriteEnded(report.number, report.whole, report.stray, report.why, report.digests)
        )
