"""Compile, or load from the cache, a model's kernels before the first request waits for them."""

from __future__ import annotations

import numpy as np
import torch

from stanchion.device.cpu import InlineQueue
from stanchion.device.stream import Stream
from stanchion.kv.store import Leased, Store
from stanchion.model.glm5 import Glm5
from stanchion.model.text import Ragged


def warm_up(model: Glm5) -> None:
    """One query whose context is just too long to be taken whole, over one page again and again.

    Seconds when nothing is cached, a fraction of one afterwards. Touches a store of its own.
    """
    page_tokens = model.schema.page_tokens
    position = min(model.config.index_topk, model.context_max - 1)
    tables = np.ones(position // page_tokens + 1, np.int32)
    batch = Ragged(
        tokens=np.zeros(1, np.int64),
        positions=np.full(1, position),
        rows=np.full(1, page_tokens),
        starts=np.arange(2),
        tables=tables,
        table_starts=np.array([0, len(tables)]),
    )
    page = np.ones(1, np.int32)
    cache = Leased(Store(model.schema, 2), Stream("warm up", InlineQueue()), [], page, page)
    hidden = model.forward(batch, cache)
    model.logits(hidden)
    if model.schema.draft:
        model.draft_logits(model.draft(batch, torch.zeros_like(hidden), cache))
