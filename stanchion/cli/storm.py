"""Traffic of the hash model, each request with the answer that it gets alone. Seeded, no I/O.

Requests are drawn from a finite variety, so that each answer is worked out once, and so that
prompts are met in caches. Most are short; one in fifty is as long as is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from stanchion.cli.drive import Answer
from stanchion.core.messages import Abort, Ended, Start, Tokens
from stanchion.core.outcome import Completed, Outcome
from stanchion.core.request import Sampling
from stanchion.engine.assemble import assemble
from stanchion.engine.scheduler import Limits
from stanchion.model.hashed import HashModel

PREFIXES = 16
ANSWER_TOKENS_MAX = 40
LONG_ONE_IN = 50
SHORT_TOKENS_MAX = 400


@dataclass(frozen=True)
class Expected:
    start: Start
    tokens: list[int]
    logprobs: list[float]
    record: list[tuple[list[int], int]]
    outcome: Outcome


@dataclass(frozen=True)
class Wrong:
    """A wrong answer, as evidence: who has the request can work out again what was right."""

    why: str
    request: str
    start: Start
    at: int  # the first token that differs
    expected: str  # digest of all tokens and drafts, or of the KV
    actual: str


def starts(seed: int, variety: int, context_max: int) -> Iterator[Start]:
    """As many different requests; prompts share prefixes of every length."""
    rng = np.random.default_rng(seed)
    longest = max(context_max - ANSWER_TOKENS_MAX, 2)
    prefixes = [rng.integers(32, 127, longest) for _ in range(PREFIXES)]
    for at in range(variety):
        length = int(rng.integers(1, min(SHORT_TOKENS_MAX, longest)))
        if at % LONG_ONE_IN == 0:
            length = longest
        tail = int(rng.integers(1, min(48, length + 1)))
        prefix = prefixes[int(rng.integers(PREFIXES))][: length - tail]
        tokens = [*prefix.tolist(), *rng.integers(32, 127, tail).tolist()]
        sampling = Sampling(
            max_tokens=int(rng.integers(1, ANSWER_TOKENS_MAX)),
            temperature=0.0 if rng.integers(2) else 0.8,
            seed=int(rng.integers(1 << 30)),
            ignore_eos=bool(rng.integers(2)),
        )
        tenant = f"tenant {rng.integers(4) // 3}"
        yield Start(request=f"{at}", tokens=tokens, sampling=sampling, tenant=tenant)


class Oracle:
    """The same request alone and cold: one engine, whose cache is emptied after each."""

    def __init__(
        self, page_tokens: int, draft_tokens: int, top_k: int | None, context: int
    ) -> None:
        model = HashModel(page_tokens, draft_tokens > 0, top_k)
        limits = Limits(chunk_tokens=1 << 16, draft_tokens=draft_tokens)
        pages = context // page_tokens + 8
        self._engine = assemble(
            model, limits, pages, eos_ids=model.eos_ids, record_drafts=True
        ).engine

    def answer(self, start: Start) -> Expected:
        engine = self._engine
        tokens: list[int] = []
        logprobs: list[float] = []
        heard: list[Start | Abort] = [start]
        with torch.inference_mode():
            while True:
                for message in engine.step(heard):
                    if isinstance(message, Tokens):
                        tokens += message.tokens
                        logprobs += message.logprobs
                    elif isinstance(message, Ended):
                        engine.tree.flush()
                        record = message.draft_record or []
                        return Expected(start, tokens, logprobs, record, message.outcome)
                heard = []


def wrong(expected: Expected, answer: Answer) -> Wrong | None:
    """Compare an answer, or as much of it as was said, with what is right."""
    said, record = answer.tokens, answer.draft_record or []
    whole = isinstance(answer.outcome, Completed)
    right, drafts = expected.tokens, expected.record
    logprobs = expected.logprobs
    if not whole:
        right, drafts = right[: len(said)], drafts[: len(record)]
        logprobs = logprobs[: len(said)]
    same = said == right and answer.logprobs == logprobs and record == drafts
    if same and (not whole or answer.outcome == expected.outcome):
        return None
    at = next((at for at, pair in enumerate(zip(said, right)) if pair[0] != pair[1]), len(right))
    why = "the text" if said != right else "a log-probability, a draft or the ending"
    return Wrong(
        f"{why} is not what the request gets alone",
        expected.start.request,
        expected.start,
        at,
        digest(right, drafts),
        digest(said, record),
    )


def digest(tokens: list[int], record: list[tuple[list[int], int]]) -> str:
    return blake2b(repr((tokens, record)).encode(), digest_size=16).hexdigest()
