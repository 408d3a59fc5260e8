"""How simulated KV gets from one worker's memory to another's: writes in flight, pools, fences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stanchion.core.errors import Bug
from stanchion.kv.transfer.words import Invitation, ShmPlace, Write, WriteEnded
from stanchion.sim.device import Memory


@dataclass(eq=False)
class Flying:
    write: Write
    invited: int  # by which invitation
    lane: Lane
    stray: bool = False  # it failed at its source, and may land all the same


@dataclass(eq=False)
class Lane:
    """A prefill worker's way to others' memory."""

    memory: Memory
    memories: dict[int, Memory]  # by invitation: those that can be written
    flying: list[Flying]  # the cluster's
    peers: dict[int, int] = field(default_factory=dict)  # session -> invitation
    ended: list[WriteEnded] = field(default_factory=list)
    bytes_sent: int = 0

    def connect(self, peer: int, invitation: Invitation) -> None:
        assert isinstance(invitation.place, ShmPlace)
        self.peers[peer] = invitation.place.descriptor

    def disconnect(self, peer: int) -> None:
        mine = (one for one in self.flying if one.lane is self and one.write.peer == peer)
        if not all(one.stray for one in mine):
            raise Bug("a peer with writes in flight is disconnected")
        del self.peers[peer]

    def send(self, write: Write) -> None:
        self.flying.append(Flying(write, self.peers[write.peer], self))
        self.bytes_sent += 1

    def cut(self, numbers: Sequence[int]) -> None:
        """Nothing that has begun is stopped, as with a network."""

    def poll(self) -> list[WriteEnded]:
        ended, self.ended = self.ended, []
        return ended


@dataclass(eq=False)
class Pool:
    """Decode's memory. With `fences` it can shut a peer out; else that writes until its end."""

    memory: Memory
    memories: dict[int, Memory]
    numbers: Iterator[int]
    pages: int
    fences: bool
    invited: dict[int, int] = field(default_factory=dict)  # peer -> invitation
    local: bool = True

    def invitation(self, peer: int) -> Invitation:
        number = self.invited[peer] = next(self.numbers)
        self.memories[number] = self.memory
        return Invitation(
            place=ShmPlace(number), pid=1, token=number.to_bytes(16, "big"),
            pages=self.pages, page_tokens=self.memory.page_tokens, size=0, buffers={},
        )  # fmt: skip

    def fence(self, peer: int, ended: bool) -> bool:
        if self.fences and peer in self.invited:
            del self.memories[self.invited.pop(peer)]
        return self.fences or ended
