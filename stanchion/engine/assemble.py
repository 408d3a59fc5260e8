"""Put an engine together from a model: the one place that knows all of its parts."""

from __future__ import annotations

from stanchion.core.errors import ConfigError
from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Stream
from stanchion.engine.loop import FAILPOINTS, Engine, Served
from stanchion.engine.runner import Runner
from stanchion.engine.scheduler import Limits
from stanchion.kv.pages import PagePool
from stanchion.kv.prefix import PrefixTree
from stanchion.kv.ready import Ready
from stanchion.kv.store import Store
from stanchion.model.text import Model


def assemble(
    model: Model,
    limits: Limits,
    pages: int,
    name: str = "hashed",
    revision: str = "",
    eos_ids: tuple[int, ...] = (),
    failpoints: frozenset[str] = frozenset(),
    record_drafts: bool = False,
) -> Engine:
    """`pages` counts the null page. Raise ConfigError for a failpoint that does not exist."""
    if unknown := sorted(failpoints - FAILPOINTS.keys()):
        raise ConfigError(f"no failpoint {unknown[0]}; there are: {', '.join(sorted(FAILPOINTS))}")
    schema = model.schema
    pool = PagePool(pages)
    ready = Ready(pages, schema.layers, schema.page_tokens)
    stream = Stream("compute", InlineQueue())
    runner = Runner(model, Store(schema, pages), stream, pool, ready)
    served = Served(
        name, revision, schema.digest(), model.vocabulary, model.context_max, eos_ids
    )
    tree = PrefixTree(pool, schema.page_tokens)
    return Engine(
        served, limits, pool, tree, ready, runner.launch, failpoints, record_drafts
    )
