"""What a worker can serve at all, what it refuses, and where an answer stops. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from stanchion.core.identity import CacheIdentity, Digest
from stanchion.core.matching import GrammarFault, Grammars
from stanchion.core.messages import Start
from stanchion.core.outcome import Completed, Outcome, Overloaded, Rejected
from stanchion.core.request import rank
from stanchion.engine.grammar import begun
from stanchion.engine.request import Request
from stanchion.engine.scheduler import Limits

FAILPOINTS = {
    "foreign_write": "another request's KV is written over that of some requests (engine/meddler)",
    "flight_without_pin": "a flight relies on its requests' pins: they may end while it is out",
    "hit_without_pin": "a prefix hit takes no pin: eviction may give its pages away",
    "publish_before_complete": "a prompt's pages are shared before they are computed",
    "watermark_not_lowered": "rows of rejected drafts keep counting as ready",
}


@dataclass(frozen=True)
class Served:
    """What is served: the part of a CacheIdentity that the worker knows, and the model's bounds."""

    model: str
    revision: str
    schema: str
    vocabulary: int
    context_max: int
    eos_ids: tuple[int, ...]


def refusal(
    start: Start, served: Served, capacity_tokens: int, waiting: int, limits: Limits
) -> Outcome | None:
    """Why this request cannot be taken, or None."""
    if waiting >= limits.waiting_max:
        return Overloaded(f"{waiting} requests are waiting already", 1.0)
    length, most = len(start.tokens), start.sampling.max_tokens
    room = min(served.context_max, capacity_tokens)
    if length + most > room:
        said = f"{length} prompt tokens and {most} new ones are over the {room} that fit here"
        return Rejected("max_tokens" if length < room else "prompt", said)
    vocabulary = served.vocabulary
    if max(start.tokens) >= vocabulary:
        return Rejected("prompt", f"a token id is not below the vocabulary, {vocabulary}")
    if start.said >= length:
        return Rejected("said", "the answer's own tokens leave nothing of the prompt")
    if start.grammar is not None and (start.sampling.ignore_eos or start.sampling.min_tokens):
        return Rejected("grammar", "with it an answer ends where the grammar does, and not later")
    named = (*start.sampling.stop_ids, *(token for token, _ in start.sampling.logit_bias))
    if named and max(named) >= vocabulary:
        field_name = "stop_ids" if max(start.sampling.stop_ids, default=0) >= vocabulary else ""
        return Rejected(field_name or "logit_bias", f"a token id is not below {vocabulary}")
    return None


def root_of(tenant: str, salt: str, served: Served) -> Digest:
    """Of the prefix chain of this tenant and salt."""
    return CacheIdentity(tenant, salt, served.model, served.revision, served.schema).digest()


def accepted(
    start: Start, served: Served, arrivals: int, grammars: Grammars | None = None
) -> Request | Rejected:
    """The request that this message asks for. Without a seed, its name is its seed."""
    try:
        matcher = begun(start, grammars)
    except GrammarFault as fault:
        return Rejected("grammar", str(fault))
    arrival = rank(arrivals, start.priority)
    length = len(start.tokens)
    tokens = np.zeros(length + start.sampling.max_tokens, np.int32)
    tokens[:length] = start.tokens
    root = root_of(start.tenant, start.salt, served)
    seed = start.sampling.seed
    if seed is None:
        seed = int.from_bytes(blake2b(start.request.encode(), digest_size=8).digest(), "little")
    eos = () if start.sampling.ignore_eos else served.eos_ids
    ends = (*eos, *start.sampling.stop_ids)
    return Request(
        start, arrival, seed, ends, served.eos_ids, root, tokens, length, matcher=matcher
    )


def cut(request: Request, tokens: list[int]) -> tuple[int, Outcome | None]:
    """How many of the new tokens count, and whether they end the request."""
    for at, token in enumerate(tokens):
        generated = request.generated + at + 1
        if token in request.ends and generated > request.sampling.min_tokens:
            return at + 1, Completed("stop")
        if generated == request.sampling.max_tokens:
            return at + 1, Completed("length")
    return len(tokens), None
