"""Real Claude Code sessions, scaled down, on the hash model: real prefix structure, exact answers.

Each block of 64 tokens becomes one page of 4, so hits and lengths keep their proportions. The
folder of public traces is named by STANCHION_TRACES: without it these skip, and fail in soak.
"""

from __future__ import annotations

import gzip
import json
import os
from itertools import islice
from pathlib import Path

import pytest

from stanchion.core.messages import Start
from stanchion.core.request import Sampling
from stanchion.engine.scheduler import Limits
from tests.engine.rig import Heard, hashed_engine, solo

TRACE = "weka_claude_code_sessions.jsonl.gz"
PAGE = 4


def sessions(count: int, required: bool) -> list[list[Start]]:
    """The first `count` sessions, each a list of requests in order."""
    folder = os.environ.get("STANCHION_TRACES")
    if folder is None:
        (pytest.fail if required else pytest.skip)("STANCHION_TRACES is not set")
    with gzip.open(Path(folder) / TRACE, "rt") as lines:
        return [_session(json.loads(line)) for line in islice(lines, count)]


def _session(said: dict[str, object]) -> list[Start]:
    requests = said["requests"]
    assert isinstance(requests, list)
    return [
        Start(
            request=f"{said['id']} {at}",
            tokens=[token for block in one["hash_ids"] for token in _page(block)],
            sampling=Sampling(max_tokens=4 + one["out"] // 16, temperature=0.0, ignore_eos=True),
            tenant=str(said["id"]),  # block ids are local to a session
        )
        for at, one in enumerate(requests)
        if one.get("hash_ids")
    ]


def _page(block: int) -> list[int]:
    return [32 + (block * step + step) % 95 for step in (1, 7, 31, 53)]


def replay(every: list[list[Start]], pages: int, running: int) -> tuple[int, int]:
    """Each session's requests one after another, sessions side by side. Return hits, possible."""
    engine = hashed_engine(Limits(chunk_tokens=256, running_max=running), pages, PAGE)
    heard: dict[str, Heard] = {}
    asked = [start for session in every for start in session]
    left = [list(session) for session in every]
    while any(left) or engine.busy:
        starts = [
            queue.pop(0)
            for queue, session in zip(left, every)
            if queue and not _open(heard, session)
        ]
        heard |= {start.request: Heard() for start in starts}
        for message in engine.step(starts):
            heard[message.request].take(message)
    assert engine.audit() == []
    for start in asked:
        assert heard[start.request].answer == solo(start, 3).answer, start.request
    hits = sum(one.ends[0].cached_tokens for one in heard.values())
    return hits, sum(len(start.tokens) for start in asked)


def _open(heard: dict[str, Heard], session: list[Start]) -> bool:
    return any(one.request in heard and not heard[one.request].ends for one in session)


def test_a_few_sessions_get_their_oracles_answers() -> None:
    hits, total = replay([session[:6] for session in sessions(4, required=False)][1:], 4096, 8)
    print(f"{hits} of {total} prompt tokens from the prefix tree")
    assert hits > total // 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_sessions_in_a_pool_that_is_too_small() -> None:
    every = [session[:20] for session in sessions(18, required=True)]
    hits, total = replay(every, 6000, 12)
    print(f"{hits} of {total} prompt tokens from the prefix tree")
    assert hits > 0
