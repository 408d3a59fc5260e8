"""Pages whose bytes follow from their keys, and a process that stores them until it is killed:
`python diskwriter.py FOLDER SEED`."""

from __future__ import annotations

import sys
import time
from hashlib import blake2b, shake_128
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stanchion.core.identity import chain
from stanchion.device.cpu import ThreadQueue
from stanchion.device.stream import JobQueue
from stanchion.kv.disk import DiskTier
from stanchion.kv.record import Record
from stanchion.sim.choices import seeded

PAGE_BYTES = 3000
SCHEMA = "schema of the test"
CHAINS, LENGTH = 24, 12
CAPACITY = 24 * (4096 + 5 * PAGE_BYTES)  # so that files leave and come again
Bytes = NDArray[np.uint8]


def content(key: bytes, page_bytes: int = PAGE_BYTES) -> Bytes:
    return np.frombuffer(shake_128(key).digest(page_bytes), np.uint8)


def run(number: int, length: int = LENGTH) -> list[Record]:
    """The pages of one prefix."""
    root = key = blake2b(f"prefix {number}".encode(), digest_size=32).digest()
    records = []
    for at in range(length):
        tokens = np.arange(at, at + 4, dtype="<i4").tobytes()
        key = chain(key, tokens)
        records.append(Record(key, root, tokens, key[:16]))
    return records


def tier_in(
    folder: Path,
    slots: int,
    queues: tuple[JobQueue, JobQueue] | None = None,
    capacity: int = CAPACITY,
    page_bytes: int = PAGE_BYTES,
) -> DiskTier:
    memory = np.zeros(slots * page_bytes, np.uint8)
    queues = queues or (ThreadQueue("disk read"), ThreadQueue("disk write"))
    return DiskTier.open_in(folder, capacity, SCHEMA, memory, page_bytes, queues, 1024, clock)


def clock() -> float:
    return 0.0


def put(tier: DiskTier, slot: int, record: Record) -> None:
    begin = slot * tier.page_bytes
    tier.memory[begin : begin + tier.page_bytes] = content(record.key, tier.page_bytes)


def store_for_ever(folder: Path, seed: int) -> None:
    choices = seeded(seed)
    tier = tier_in(folder, LENGTH)
    print("begins", flush=True)
    while True:
        records = run(choices.pick(CHAINS))
        first = choices.pick(LENGTH)
        some = records[first : first + 1 + choices.pick(LENGTH)]
        for slot, record in enumerate(some):
            put(tier, slot, record)
        storing = tier.store(some, np.arange(len(some), dtype=np.int32))
        while storing is not None and not storing.ended:
            time.sleep(0)
            tier.poll()


if __name__ == "__main__":
    store_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
