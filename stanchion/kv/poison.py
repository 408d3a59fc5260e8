"""Overwrite freed pages, so that whoever still reads one is found out. For tests and the lab.

Floats become NaN, which no engine lets pass; integers become a pattern that no model writes.
"""

from __future__ import annotations

import numpy as np
import torch

from stanchion.device.stream import Pages, Stream
from stanchion.kv.schema import DOORS
from stanchion.kv.store import Store

PATTERN = 0x5A


def poison(store: Store, stream: Stream, pages: Pages) -> None:
    page_tokens = store.schema.page_tokens
    rows = torch.from_numpy(
        (pages[:, None].astype(np.int64) * page_tokens + np.arange(page_tokens)).ravel()
    )
    for layer in range(store.schema.layers):
        for door in DOORS:
            with stream.writing(store.behind(layer, door), pages) as view:
                for tensor in view.rows.values():
                    if tensor.is_floating_point():
                        tensor[rows] = torch.nan
                    else:
                        tensor[rows] = PATTERN
