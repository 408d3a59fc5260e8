"""Who computes what in the next flight: pure, from the requests in order of arrival.

Every decoding request gets its verify step in every flight. Prefill gets at most `chunk_tokens` a
flight: half of it in order of arrival, so that the oldest is always served, and half shared equally
by the others, smallest needs first. So between two tokens of a request lie at most one chunk and
one batch of verify steps; and of n prompts each gets at least chunk_tokens / 2n tokens a flight
(in whole tokens, as far as they go), however long the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stanchion.device.stream import Pages
from stanchion.engine.request import Ahead, Request


@dataclass(frozen=True)
class Limits:
    """What bounds a worker's work. Lengths in tokens."""

    chunk_tokens: int = 512
    running_max: int = 64
    waiting_max: int = 1024
    overtakes_max: int = 16
    draft_tokens: int = 3


@dataclass(frozen=True)
class Piece:
    """One request's share of a flight: target positions first to first + count - 1.

    `drafts` says how many of them hold drafts. `redone` of the first positions keep their rows.
    """

    request: Request
    first: int
    count: int
    drafts: int
    redone: int
    samples: bool  # its last position (every position of a verify step) asks for a token
    pages: Pages  # as they were when the flight began: the request may end while it is out
    ahead: Ahead | None
    decodes: bool  # a verify step, not a prefill chunk


def plan(running: Sequence[Request], limits: Limits) -> list[Piece]:
    pieces = [_verify_step(one, limits) for one in running if one.phase == "decode"]
    waiting = [one for one in running if one.phase == "prefill"]
    return pieces + [
        _chunk(one, share)
        for one, share in zip(waiting, _shares(waiting, limits.chunk_tokens))
        if share
    ]


def _verify_step(request: Request, limits: Limits) -> Piece:
    drafts = request.drafts(limits.draft_tokens) if request.ahead is not None else 0
    return Piece(
        request, request.computed, 1 + drafts, drafts, redone=0, samples=True,
        pages=request.pages, ahead=request.ahead, decodes=True,
    )  # fmt: skip


def _chunk(request: Request, share: int) -> Piece:
    redone = int(request.redo)
    first = request.computed - redone
    last = first + share == request.prefill_end
    samples = last and not request.generated and request.sampling.max_tokens > 0
    return Piece(request, first, share, 0, redone, samples, request.pages, None, False)


def to_compute(request: Request) -> int:
    return request.prefill_end - request.computed + int(request.redo)


def _shares(requests: Sequence[Request], budget: int) -> list[int]:
    """How many tokens each gets, in order of arrival. Nothing is left over while one wants it."""
    shares = [0] * len(requests)
    left = (budget + 1) // 2 if len(requests) > 1 else budget
    budget -= left
    left = _in_turn(requests, shares, left)
    order = sorted(range(len(requests)), key=lambda at: to_compute(requests[at]) - shares[at])
    order = [at for at in order if to_compute(requests[at]) > shares[at]]
    budget += left
    for place, at in enumerate(order):
        equal = -(-budget // (len(order) - place))
        given = min(to_compute(requests[at]) - shares[at], equal, budget)
        shares[at] += given
        budget -= given
    return shares


def _in_turn(requests: Sequence[Request], shares: list[int], budget: int) -> int:
    """Give to the oldest what it needs, then to the next; return what is left."""
    for at, request in enumerate(requests):
        shares[at] = min(to_compute(request), budget)
        budget -= shares[at]
    return budget
