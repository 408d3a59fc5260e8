"""A process at the other end of a transfer: `python peer.py BACKEND`, told what to do on stdin.

Every answer on stdout is its length, then that many bytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stanchion.kv.arena import Arena
from stanchion.kv.layout import Layout
from stanchion.kv.schema import Buffer, Schema
from stanchion.kv.transfer.nixl import NixlTarget
from stanchion.kv.transfer.shm import shm_invitation, shm_transfer
from stanchion.kv.transfer.words import Write, decode_invitation, encode_invitation

TOKENS = 4
SCHEMA = Schema(
    "test", TOKENS, 2, False,
    (
        Buffer("latent", 0, "attend", "bfloat16", 72),
        Buffer("key", 0, "index", "float8_e4m3fn", 33),
        Buffer("latent", 1, "attend", "bfloat16", 72),
    ),
)  # fmt: skip
BIG = Schema("big", 64, 1, False, (Buffer("latent", 0, "attend", "int64", 1024),))


def fill(memory: np.ndarray, seed: int) -> None:
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)


class Child:
    """The same, seen from the test."""

    def __init__(self, backend: str) -> None:
        command = [sys.executable, str(Path(__file__)), backend]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, *words: Any) -> bytes:
        assert self.process.stdin and self.process.stdout
        said = msgspec.json.encode(words)
        self.process.stdin.write(said + b"\n")
        self.process.stdin.flush()
        size = int.from_bytes(self.process.stdout.read(8), "little")
        return self.process.stdout.read(size)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


class Target:
    """Its pool is open to writes, full of what `seed` gives."""

    def __init__(self, backend: str, schema: Schema, pages: int, seed: int) -> None:
        self.layout = Layout.of(schema, pages)
        self.arena = Arena.shared(self.layout.total)
        fill(self.arena.memory, seed)
        if backend == "shm":
            self.invitation = shm_invitation(self.arena, self.layout)
        else:
            self.nixl = NixlTarget(self.arena, self.layout)
            self.invitation = self.nixl.invitation(1)


class Source:
    """Writes big pages into the test's pool without an end, until it is stopped or killed."""

    def __init__(self, invitation: bytes, pages: int) -> None:
        layout = Layout.of(BIG, pages)
        arena = Arena.private(layout.total)
        arena.memory[:] = 1
        self.transfer = shm_transfer(arena, layout)
        self.transfer.connect(0, decode_invitation(invitation))
        self.pages = np.arange(pages, dtype=np.int32)
        self.number = 0

    def write(self) -> None:
        for _ in range(50):
            write = Write(self.number, 0, 0, self.pages, self.pages, 64)
            self.transfer.submit(write)
            self.number += 1


def main(backend: str) -> None:
    held: list[Any] = []
    for line in sys.stdin.buffer:
        word, *rest = msgspec.json.decode(line)
        if word == "target":
            held.append(Target(backend, SCHEMA, *rest))
            answer = encode_invitation(held[-1].invitation)
        elif word == "big target":
            held.append(Target(backend, BIG, *rest, 0))
            answer = encode_invitation(held[-1].invitation)
        elif word == "invite":
            answer = encode_invitation(held[0].nixl.invitation(*rest))
        elif word == "fence and clear":
            peer, first, end = rest
            assert held[0].nixl.fence(peer)
            size = BIG.page_bytes
            held[0].arena.memory[first * size : end * size] = 0
            answer = b"fenced"
        elif word == "memory":
            answer = held[0].arena.memory.tobytes()
        elif word == "source":
            held.append(Source(bytes.fromhex(rest[0]), rest[1]))
            held[-1].write()
            answer = b"writing"
        else:
            raise ValueError(word)
        sys.stdout.buffer.write(len(answer).to_bytes(8, "little") + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
