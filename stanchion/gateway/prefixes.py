"""What each worker is believed to hold of prompts: chained hashes of token blocks. Pure.

Each hash chains the cache identity (tenant and salt in it) and all tokens before its own, as the
workers' own keys do, so a hit never crosses tenants. Only what was sent from here is known, and a
worker evicts without saying so: a belief is worth a place in a score, and nothing else hangs on it.

Memory is bounded: a worker's blocks leave longest unused first, at the number that its device and
its tiers can hold, and a prompt's end before its beginning, so what is held of a prompt is a run.
The most recent, as many as its device has room for, count as on the device; the rest as in tiers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from stanchion.core.identity import CacheIdentity, Digest, chain
from stanchion.core.messages import Hello, Start
from stanchion.gateway.router import Life

BLOCK_TOKENS_MIN = 64
BLOCKS_MAX = 4096  # of one prompt: what is behind them does not count


@dataclass(frozen=True)
class Blocks:
    """The hashes of a prompt's whole blocks, in order; each is `tokens` long."""

    keys: tuple[Digest, ...] = ()
    tokens: int = BLOCK_TOKENS_MIN


@dataclass(frozen=True)
class Hit:
    """Leading tokens of a prompt that a worker holds: on its device, and behind those in tiers."""

    device: int = 0
    tiers: int = 0


NO_HIT = Hit()


def blocks_of(start: Start, hello: Hello) -> Blocks:
    """Blocks are whole pages, and not so short that hashing them would cost more than it saves."""
    page = hello.page_tokens
    size = page * -(-BLOCK_TOKENS_MIN // page)
    count = min(len(start.tokens) // size, BLOCKS_MAX)
    if not count:
        return Blocks((), size)
    identity = CacheIdentity(start.tenant, start.salt, hello.model, hello.revision, hello.schema)
    # The same bytes as of "i", which is what the workers hash, in a third of the time.
    raw = memoryview(array("I", start.tokens[: count * size]).tobytes())
    key, keys, width = identity.digest(), [], size * array("I").itemsize
    for at in range(count):
        key = chain(key, bytes(raw[at * width : (at + 1) * width]))
        keys.append(key)
    return Blocks(tuple(keys), size)


@dataclass(eq=False)
class _Held:
    """Least recently used first."""

    device: OrderedDict[Digest, None] = field(default_factory=OrderedDict)
    tiers: OrderedDict[Digest, None] = field(default_factory=OrderedDict)


class Prefixes:
    """`blocks_max` bounds what is kept of all workers together."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._held: dict[Life, _Held] = {}

    def __len__(self) -> int:
        return sum(len(one.device) + len(one.tiers) for one in self._held.values())

    def sent(self, life: Life, blocks: Blocks, device: int, tiers: int) -> None:
        """That worker has, or will have computed, this prompt. `device` and `tiers`: how many
        blocks there is room for."""
        held = self._held.setdefault(life, _Held())
        for key in reversed(blocks.keys):
            held.tiers.pop(key, None)
            held.device[key] = None
            held.device.move_to_end(key)
        share = self._blocks_max // len(self._held)
        device = min(device, share)
        while len(held.device) > device:
            key, _ = held.device.popitem(last=False)
            held.tiers[key] = None
        while len(held.tiers) > min(tiers, share - device):
            held.tiers.popitem(last=False)

    def hit(self, life: Life, blocks: Blocks) -> Hit:
        held = self._held.get(life)
        if held is None or not blocks.keys:
            return NO_HIT
        device = _run(held.device, blocks.keys)
        return Hit(device * blocks.tokens, _run(held.tiers, blocks.keys[device:]) * blocks.tokens)

    def forget(self, life: Life) -> None:
        """It holds nothing any more, or nothing that may be found."""
        self._held.pop(life, None)

    def keep(self, lives: Container[Life]) -> None:
        """All others are gone."""
        self._held = {life: held for life, held in self._held.items() if life in lives}


def _run(held: Container[Digest], keys: Sequence[Digest]) -> int:
    """How many of the first keys are there: since later ones leave first, by halving."""
    return bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in held)
