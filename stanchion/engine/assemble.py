"""Put an engine together from a model: the one place that knows all of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from stanchion.core.errors import ConfigError
from stanchion.core.matching import Grammars
from stanchion.device.stream import Stream
from stanchion.engine.bounds import FAILPOINTS, Served
from stanchion.engine.loop import Engine
from stanchion.engine.meddler import Meddler
from stanchion.engine.others import Others
from stanchion.engine.ranks import Ranked, Ranks
from stanchion.engine.runner import Runner
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan, build_tiers, compute_stream
from stanchion.kv.arena import Arena
from stanchion.kv.pages import PagePool
from stanchion.kv.poison import poison
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready
from stanchion.kv.store import Store
from stanchion.model.text import Model

PAGES_MAX = 2**20


def pages_that_fit(page_bytes: int, memory_gib: float) -> int:
    """Pages of this size in so much memory, with the null page. Raise ConfigError for none."""
    pages = min(int(memory_gib * 2**30) // page_bytes, PAGES_MAX)
    if pages < 2:
        least = 2 * page_bytes / 2**30
        raise ConfigError(f"kv.memory_gib is {memory_gib}; two pages need {least:.6f}")
    return pages


@dataclass(frozen=True)
class Parts:
    """An engine, and what others than its loop work with."""

    engine: Engine
    runner: Runner
    store: Store
    stream: Stream
    others: Others | None = None


def assemble(
    model: Model,
    limits: Limits,
    pages: int,
    name: str = "hashed",
    revision: str = "",
    eos_ids: tuple[int, ...] = (),
    failpoints: frozenset[str] = frozenset(),
    record_drafts: bool = False,
    context_max: int = 0,
    arena: Arena | None = None,
    poisoned: bool = False,
    tiers: TierPlan | None = None,
    ranks: Ranks | None = None,
    others: Others | None = None,
    grammars: Grammars | None = None,
    foreign_share: float = 1.0,
) -> Parts:
    """`pages` counts the null page; `context_max` 0 means the model's own. With `ranks` this is
    rank 0 of several, and `others` are those. Without `grammars` requests that have one are
    refused. `foreign_share`: of the requests that the failpoint foreign_write strikes.

    Raise ConfigError for a failpoint that does not exist.
    """
    if unknown := sorted(failpoints - FAILPOINTS.keys()):
        raise ConfigError(f"no failpoint {unknown[0]}; there are: {', '.join(sorted(FAILPOINTS))}")
    schema = model.schema
    pool = PagePool(pages)
    ready = Ready(pages, schema.target_layers, schema.layers, schema.page_tokens)
    stream = compute_stream(schema, tiers)
    store = Store(schema if ranks is None else ranks.schema(schema), pages, arena)
    ranked = None
    if ranks is not None and others is not None:
        model = ranked = Ranked(ranks.side(model, store, stream), others.pass_on)
    if poisoned:
        pool.on_free = partial(poison, store, stream)
    runner = Runner(model, store, stream, pool, ready)
    if ranked is not None:
        runner.apart = ranked.apart
    served = Served(
        name,
        revision,
        schema.digest(),
        model.vocabulary,
        min(context_max or model.context_max, model.context_max),
        eos_ids,
    )
    tree = PrefixTree(pool, schema.page_tokens)
    engine = Engine(served, limits, pool, tree, ready, runner.launch, failpoints, record_drafts)
    engine.grammars = grammars
    if "foreign_write" in failpoints:
        if ranks is not None:
            raise ConfigError("the failpoint foreign_write wants a worker of one rank")
        engine.launch = Meddler(runner.launch, store, stream, foreign_share).launch
    if tiers is not None:
        engine.tiered = build_tiers(tiers, store, pool, tree, ready, others)
    return Parts(engine, runner, store, stream, others)
