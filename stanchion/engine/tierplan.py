"""The tiers of one engine: what is wanted, and how it is put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stanchion.core.errors import ConfigError
from stanchion.device.cpu import InlineQueue, ThreadQueue
from stanchion.device.hasty import Hasty
from stanchion.device.stream import JobQueue, Stream
from stanchion.engine.others import Others, RankedCopier
from stanchion.engine.tiered import Tiered
from stanchion.kv.arena import Arena
from stanchion.kv.copies import Copier
from stanchion.kv.copy import Mode, StoreCopier
from stanchion.kv.disk import DiskTier
from stanchion.kv.hosttier import HostTier
from stanchion.kv.pages import PagePool
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready
from stanchion.kv.schema import DOORS, Door, Schema
from stanchion.kv.store import Store
from stanchion.kv.tiers import Policy, Prefetch, Tiers

Place = tuple[int, Door]


@dataclass(frozen=True)
class TierPlan:
    """`slots`: pages of host memory. `disk`: a folder and its bytes. `delays_s`: how long a load of
    a (layer, door) is held back, for the lab; `removed`: the door that forgets to wait, if the
    failpoint says so. `queue` makes the streams' queues: the simulator has its own."""

    slots: int
    disk: tuple[Path, int] | None = None
    policy: Policy = "through"
    prefetch: Prefetch = "timeout"
    check: Mode = "off"
    failpoints: frozenset[str] = frozenset()
    delays_s: Mapping[Place, float] = field(default_factory=dict)
    removed: Place | None = None
    queue: Callable[[str], JobQueue] = ThreadQueue
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def compute_stream(schema: Schema, plan: TierPlan | None) -> Stream:
    """The engine's own stream; where a failpoint says so, it forgets to wait at some doors."""
    blind = _blind(schema, plan) if plan is not None else frozenset()
    queue = InlineQueue()
    if not blind:
        return Stream("compute", queue)
    return Hasty("compute", queue, frozenset(f"layer {layer} {door}" for layer, door in blind))


def host_arena(plan: TierPlan, schema: Schema) -> Arena:
    """As many slots as the plan says, and slot 0, which is nobody's."""
    return Arena.private(schema.page_bytes * (plan.slots + 1))


def copier_of(plan: TierPlan, store: Store, arena: Arena) -> StoreCopier:
    """Between a rank's own pool and its own host memory."""
    return StoreCopier(
        store,
        arena.memory,
        plan.queue("load"),
        plan.queue("spill"),
        check=plan.check,
        digests=plan.disk is not None,
        delays=plan.delays_s,
        sleep=plan.sleep,
        left_out=_left_out(store.schema, plan.failpoints),
    )


def build_tiers(
    plan: TierPlan,
    store: Store,
    pool: PagePool,
    tree: PrefixTree,
    ready: Ready,
    others: Others | None = None,
) -> Tiered:
    """With `others` this is rank 0 of several. Raise ConfigError for a failpoint that lacks its
    setting, or a folder that another holds."""
    schema = store.schema
    host = HostTier(plan.slots)
    arena = host_arena(plan, schema)
    copier: Copier = copier_of(plan, store, arena)
    if others is not None:
        copier = RankedCopier(copier, others)
    disk = None
    if plan.disk is not None:
        folder, capacity = plan.disk
        disk = DiskTier.open_in(
            folder, capacity, schema.digest(), arena.memory, schema.page_bytes,
            (plan.queue("disk read"), plan.queue("disk write")), max(plan.slots // 2, 1),
            plan.clock,
        )  # fmt: skip
    tiers = Tiers(
        pool, host, copier, disk, plan.policy, plan.prefetch, plan.failpoints, plan.clock,
        schema.page_tokens,
    )  # fmt: skip
    return Tiered(tiers, tree, ready)


def _blind(schema: Schema, plan: TierPlan) -> frozenset[Place]:
    blind: dict[Place, None] = {}
    for door in DOORS:
        if f"{door}_read_before_ready" in plan.failpoints:
            blind |= dict.fromkeys((layer, door) for layer in range(schema.layers))
    if "door_removed" in plan.failpoints:
        if plan.removed is None:
            raise ConfigError("the failpoint door_removed wants lab.removed_door, as LAYER/DOOR")
        blind[plan.removed] = None
    return frozenset(blind)


def _left_out(schema: Schema, failpoints: frozenset[str]) -> frozenset[Place]:
    every = [(layer, door) for layer in range(schema.layers) for door in DOORS]
    out: dict[Place, None] = {}
    if "restore_without_draft" in failpoints and schema.draft:
        out |= dict.fromkeys(one for one in every if one[0] == schema.layers - 1)
    if "restore_without_index" in failpoints:
        out |= dict.fromkeys(one for one in every if one[1] == "index")
    return frozenset(out)
