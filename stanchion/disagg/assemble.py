"""Put a worker's side together: an engine, and what its role adds to it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Role
from stanchion.device.stream import Stream
from stanchion.disagg.check import Check, DigestsOf, Mode
from stanchion.disagg.decode import FAILPOINTS, DecodeSide
from stanchion.disagg.lanes import RankedLane, TransferLane
from stanchion.disagg.peer import Target, Times
from stanchion.disagg.prefill import Lane, PrefillSide
from stanchion.disagg.worker import UnifiedSide
from stanchion.engine.assemble import Parts
from stanchion.engine.bounds import FAILPOINTS as ENGINE_FAILPOINTS
from stanchion.engine.others import Others
from stanchion.kv.arena import Arena
from stanchion.kv.digest import page_digests
from stanchion.kv.layout import Layout
from stanchion.kv.schema import Schema
from stanchion.kv.store import Store
from stanchion.kv.tiers import FAILPOINTS as TIER_FAILPOINTS
from stanchion.kv.transfer.sender import Sender
from stanchion.kv.transfer.shm import shm_invitation, shm_transfer
from stanchion.kv.transfer.words import Invitation, Transfer
from stanchion.parallel.layersplit import Owners
from stanchion.parallel.words import FAILPOINTS as RANK_FAILPOINTS

if TYPE_CHECKING:
    from stanchion.kv.transfer.nixl import NixlTarget

SESSION_BITS = 62  # msgpack's integers are of 64 bits, signed or not


@dataclass(frozen=True)
class Post:
    """A worker's place in its cluster. `others` are the processes of its further ranks."""

    role: Role
    name: str
    incarnation: int
    identity: dict[str, str]
    times: Times
    check: Mode = "off"
    transport: str = "shm"
    slow_transfer_ms: float = 0.0
    failpoints: frozenset[str] = frozenset()
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShmPool:
    """Our pool in shared memory. A peer has it mapped: only the end of its process is a fence."""

    arena: Arena
    layout: Layout
    local: bool = True

    def invitation(self, peer: int) -> Invitation:
        return shm_invitation(self.arena, self.layout)

    def fence(self, peer: int, ended: bool) -> bool:
        return ended


@dataclass
class NixlPool:
    """Our pool behind an agent a peer. To destroy the agent is the fence, and the only one: over
    TCP bytes arrive after their sender's end (docs/nixl-fence.md). Where that is not shown to
    work, a peer that was once cut off stays without evidence."""

    target: NixlTarget
    invited: dict[int, None] = field(default_factory=dict)
    unproven: dict[int, None] = field(default_factory=dict)
    local: bool = False

    def invitation(self, peer: int) -> Invitation:
        self.invited[peer] = None
        return self.target.invitation(peer)

    def fence(self, peer: int, ended: bool) -> bool:
        if peer in self.invited:
            del self.invited[peer]
            if not self.target.fence(peer):
                self.unproven[peer] = None
        return peer not in self.unproven


def arena_for(role: Role, schema: Schema, pages: int) -> Arena:
    """A decode worker's pool is open to its peers; the others' are their own."""
    size = Layout.of(schema, pages).total
    return Arena.shared(size) if role == "decode" else Arena.private(size)


@dataclass(frozen=True)
class Failpoints:
    """Those named, by the room that knows them."""

    engine: frozenset[str]
    handoff: frozenset[str]
    tiers: frozenset[str]
    ranks: frozenset[str]


def split_failpoints(said: str) -> Failpoints:
    """Of names with commas between them. Raise ConfigError for one that does not exist."""
    named = frozenset(filter(None, said.split(",")))
    kinds = (
        ENGINE_FAILPOINTS.keys(),
        FAILPOINTS.keys(),
        TIER_FAILPOINTS.keys(),
        RANK_FAILPOINTS.keys(),
    )
    known = set().union(*kinds)
    if unknown := sorted(named - known):
        raise ConfigError(f"no failpoint {unknown[0]}; there are: {', '.join(sorted(known))}")
    return Failpoints(*(named & kind for kind in kinds))


def unified_side(parts: Parts) -> UnifiedSide:
    return UnifiedSide(parts.engine)


def lane_of(
    store: Store, stream: Stream, check: Mode, transport: str, slow_ms: float
) -> tuple[TransferLane, int]:
    """A rank's own, and the descriptor that is readable when a write has ended."""
    transfer = _transfer(store, transport, slow_ms)
    digests_of = _digests_of(store, stream, check)
    lane = TransferLane(transfer, Sender(store, transfer), store.schema.page_tokens, digests_of)
    return lane, transfer.fileno()


def prefill_side(
    parts: Parts, post: Post, others: Others | None = None, owners: Owners | None = None
) -> tuple[PrefillSide, int]:
    """The side, and the descriptor that is readable when a write of this process has ended. With
    `owners` each layer is sent by its own."""
    mine, bell = lane_of(
        parts.store, parts.stream, post.check, post.transport, post.slow_transfer_ms
    )
    lane: Lane = mine
    if others is not None and owners is not None:
        lane = RankedLane(mine, others, owners)
    side = PrefillSide(
        engine=parts.engine,
        identity=post.identity,
        incarnation=post.incarnation,
        pids=[os.getpid(), *post.others],
        host=host(),
        lane=lane,
        check=_check(parts, post),
        silence_s=post.times.silence_s,
        draw=partial(secrets.randbits, SESSION_BITS),
    )
    parts.runner.on_rows = side.rows_ready
    return side, bell


def decode_side(
    parts: Parts, post: Post, watch: Callable[[int, Sequence[int]], None]
) -> DecodeSide:
    return DecodeSide(
        engine=parts.engine,
        name=post.name,
        identity=post.identity,
        incarnation=post.incarnation,
        host=host(),
        target=_target(parts, post),
        check=_check(parts, post),
        times=post.times,
        watch=watch,
        failpoints=post.failpoints,
    )


def incarnation() -> int:
    return secrets.randbits(SESSION_BITS)


def host() -> str:
    """This machine since it started, and this process's space of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _transfer(store: Store, transport: str, slow_ms: float) -> Transfer:
    if transport == "nixl":
        from stanchion.kv.transfer.nixl import nixl_transfer  # an extra: not everywhere installed

        return nixl_transfer(store.arena, store.layout, slow_ms)
    return shm_transfer(store.arena, store.layout, slow_ms)


def _target(parts: Parts, post: Post) -> Target:
    store = parts.store
    if post.transport == "nixl":
        from stanchion.kv.transfer.nixl import NixlTarget

        return NixlPool(NixlTarget(store.arena, store.layout))
    return ShmPool(store.arena, store.layout)


def _check(parts: Parts, post: Post) -> Check:
    schema = parts.runner.model.schema  # whole, whatever this rank keeps of it
    return Check(post.check, schema, _digests_of(parts.store, parts.stream, post.check))


def _digests_of(store: Store, stream: Stream, check: Mode) -> DigestsOf | None:
    if check == "off":
        return None
    digests_of = partial(page_digests, store, stream)
    nothing = np.zeros(1, np.int32)
    layer = min(one.layer for one in store.schema.buffers)
    digests_of(layer, nothing, nothing)  # compiled before the first request
    return digests_of
