"""From settings to the tiers of one worker."""

from __future__ import annotations

from pathlib import Path

from stanchion.core.config import Config, disk_cache, removed_door, slow_load
from stanchion.core.errors import ConfigError
from stanchion.disagg.assemble import split_failpoints
from stanchion.engine.tierplan import Place, TierPlan
from stanchion.kv.schema import Schema


def tier_plan(config: Config, worker: str, schema: Schema, page_bytes: int) -> TierPlan | None:
    """None where no host cache is asked for. `page_bytes` are those of a page on the rank that
    keeps most of it. Raise ConfigError for a cache that holds no page."""
    kv, failpoints = config.kv, split_failpoints(config.lab.failpoints).tiers
    if not kv.host_cache_gib:
        if failpoints:
            raise ConfigError(f"the failpoint {min(failpoints)} wants kv.host_cache_gib")
        return None
    slots = int(kv.host_cache_gib * 2**30) // page_bytes
    if slots < 1:
        least = page_bytes / 2**30
        raise ConfigError(f"kv.host_cache_gib is {kv.host_cache_gib}; a page needs {least:.6f}")
    disk = disk_cache(kv.disk_cache)
    if disk is not None and (worker == ".." or Path(worker).name != worker):
        raise ConfigError(f"the worker's name is {worker!r}; with a disk cache it names a folder")
    removed = removed_door(config.lab.removed_door)
    return TierPlan(
        slots,
        None if disk is None else (Path(disk[0]) / worker, disk[1]),  # each has a folder of its own
        kv.write_policy,  # type: ignore[arg-type]  # one of them: config.check saw to it
        kv.prefetch,  # type: ignore[arg-type]
        kv.check,  # type: ignore[arg-type]
        failpoints,
        _delays(config, schema),
        None if removed is None else _place(removed, schema),
    )


def _delays(config: Config, schema: Schema) -> dict[Place, float]:
    said = slow_load(config.lab.slow_load)
    every = dict.fromkeys(((one.layer, one.door) for one in schema.buffers), said.get(None, 0.0))
    named = {_place(place, schema): ms for place, ms in said.items() if place is not None}
    return {place: ms / 1000 for place, ms in {**every, **named}.items() if ms}


def _place(said: tuple[int, str], schema: Schema) -> Place:
    for one in schema.buffers:
        if (one.layer, one.door) == said:
            return one.layer, one.door
    raise ConfigError(f"no layer of this model has a door {said[0]}/{said[1]}")
