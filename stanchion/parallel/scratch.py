"""Where ranks read the layers that others keep: two slots a door, as large as the largest pass.

While a layer is read from one slot, the next layer that has rows behind that door comes into the
other. A slot is guarded like the pool: nothing is written where somebody still reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stanchion.device.stream import Guarded
from stanchion.kv.schema import DOORS, DTYPE_BYTES, Door, Schema

SLOTS = 2
Rows = Mapping[str, Tensor]
ByLayer = Mapping[int, Rows]


@dataclass(frozen=True)
class Scratch:
    """Of a schema, for passes of up to `pages` pages, the null page counted."""

    pages: int
    slots: Mapping[Door, tuple[Guarded[ByLayer], ...]]
    orders: Mapping[Door, tuple[int, ...]]  # the layers that have rows behind each door

    @classmethod
    def of(cls, schema: Schema, pages: int) -> Scratch:
        orders = {
            door: tuple(layer for layer in range(schema.layers) if schema.behind(layer, door))
            for door in DOORS
        }
        slots = {
            door: tuple(
                Guarded(f"scratch {door} {slot}", _slot(schema, door, orders[door], pages))
                for slot in range(SLOTS)
            )
            for door in DOORS
        }
        return cls(pages, slots, orders)

    def slot(self, layer: int, door: Door) -> Guarded[ByLayer]:
        return self.slots[door][self.orders[door].index(layer) % SLOTS]


def _slot(schema: Schema, door: Door, layers: tuple[int, ...], pages: int) -> ByLayer:
    """One run of memory, as each layer would have its rows in it."""
    rows = pages * schema.page_tokens
    sizes = [sum(one.row_bytes for one in schema.behind(layer, door)) for layer in layers]
    size = max(sizes, default=0)
    memory = torch.zeros(rows * size, dtype=torch.uint8)
    found: dict[int, Rows] = {}
    for layer in layers:
        end, tensors = 0, {}
        # Widest elements first, so that each buffer begins on a multiple of its own.
        behind = sorted(schema.behind(layer, door), key=lambda one: -DTYPE_BYTES[one.dtype])
        for one in behind:
            part = memory[end : end + rows * one.row_bytes]
            tensors[one.name] = part.view(getattr(torch, one.dtype)).view(rows, one.width)
            end += len(part)
        found[layer] = tensors
    return found
