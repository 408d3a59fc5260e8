"""What lies in a page, in 8 bytes a buffer: read through the doors, so after who writes it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from stanchion.device.kernels.digest import row_digests
from stanchion.device.stream import Pages, Stream
from stanchion.kv.schema import DOORS
from stanchion.kv.store import Store


def page_digests(
    store: Store, stream: Stream, layer: int, pages: Pages, rows: Pages
) -> NDArray[np.uint64]:
    """(buffers of the layer by name, pages): the digest of the first `rows` rows of each page."""
    said: dict[str, NDArray[np.uint64]] = {}
    for door in DOORS:
        with stream.reading(store.behind(layer, door), pages) as view:
            for name, tensor in view.rows.items():
                memory = tensor.view(torch.uint8)  # (pool rows, row bytes)
                size = memory.shape[1]
                said[name] = row_digests(
                    memory.numpy().reshape(-1), 0, size, store.schema.page_tokens, pages, rows
                )
    return np.stack([said[name] for name in sorted(said)])
