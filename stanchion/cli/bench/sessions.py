"""Recorded agent sessions, scaled down: who shares which prefix, and how long prompts are to each
other, is kept. Each block of 64 tokens becomes 4 of the embedded model's kind of text."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from stanchion.core.errors import ConfigError
from stanchion.core.messages import Start
from stanchion.core.request import Sampling

TRACE = "weka_claude_code_sessions.jsonl.gz"
FIRST = 9  # of the trace's sessions: from here on they have many requests of like lengths
BLOCK = 4
SCALE = 64 // BLOCK
OUTPUT = (4, 48)


@dataclass(frozen=True)
class Session:
    starts: list[Start]

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) + one.sampling.max_tokens for one in self.starts)

    def pages(self, page_tokens: int) -> int:
        """What the whole session's KV takes."""
        seen: dict[tuple[int, ...], None] = {}
        for one in self.starts:
            for end in range(page_tokens, len(one.tokens) + 1, page_tokens):
                seen[(end, hash(tuple(one.tokens[:end])))] = None
        return len(seen) + len(self.starts) * (1 + OUTPUT[1] // page_tokens)


def sessions(
    folder: str | None, corpus: list[int], count: int, requests: int, blocks: int
) -> list[Session]:
    """The first requests of some sessions. Without a folder: made ones, of the same shape, that
    begin with so many blocks.

    Raise ConfigError where the trace is not there.
    """
    if folder is None:
        return [_made(at, corpus, requests, blocks) for at in range(count)]
    path = Path(folder) / TRACE
    try:
        with gzip.open(path, "rt") as lines:
            said = [json.loads(line) for line in islice(lines, FIRST, FIRST + count)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return [_recorded(one, corpus, requests) for one in said]


def _recorded(said: dict[str, Any], corpus: list[int], requests: int) -> Session:
    some = [one for one in said["requests"] if one.get("hash_ids")][:requests]
    name = str(said["id"])
    return Session(
        [_start(f"{name} {at}", name, one["hash_ids"], one["out"], corpus) for at, one in
         enumerate(some)]
    )  # fmt: skip


def _made(number: int, corpus: list[int], requests: int, blocks: int) -> Session:
    """A session that grows by some blocks a request, as an agent's does."""
    name = f"made {number}"
    lengths = [blocks + blocks // 10 * number + blocks // 16 * at for at in range(requests)]
    return Session(
        [_start(f"{name} {at}", name, list(range(length)), 300, corpus) for at, length in
         enumerate(lengths)]
    )  # fmt: skip


def _start(request: str, name: str, blocks: list[int], output: int, corpus: list[int]) -> Start:
    tokens = [token for block in blocks for token in _text(name, block, corpus)]
    most = min(max(output // SCALE, OUTPUT[0]), OUTPUT[1])
    sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
    return Start(request=request, tokens=tokens, sampling=sampling, tenant=name)


def _text(name: str, block: int, corpus: list[int]) -> list[int]:
    """Successive blocks of one session are successive text."""
    begin = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")
    first = (begin + block * BLOCK) % (len(corpus) - BLOCK)
    return corpus[first : first + BLOCK]
