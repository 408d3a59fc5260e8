"""What is noted of a call while it lives, and what of its request a recording is made from.

Times are of the gateway's monotonic clock. Whoever notes them does so whether or not it is
recorded: it costs nothing, and so nothing is asked twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stanchion.core.messages import Spec
from stanchion.core.recording import Api, Attempt, Finish
from stanchion.core.request import Sampling
from stanchion.gateway.choice import Piece
from stanchion.gateway.markup import Content

APIS: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
}


@dataclass
class Course:
    """`pieces`: of the first choice, kept where content is recorded."""

    arrival: float
    send: float | None = None
    first_byte: float | None = None
    first_token: float | None = None
    first_content: float | None = None
    end: float | None = None
    left: tuple[float, int] | None = None  # the client: when, and after how many tokens
    keeps: bool = False
    pieces: list[Piece] = field(default_factory=list)

    def byte(self, now: float) -> None:
        self.first_byte = now if self.first_byte is None else self.first_byte

    def ends(self, now: float) -> None:
        """Its last byte is about to be sent, or nothing will be."""
        self.end = now if self.end is None else self.end

    def token(self, now: float) -> None:
        self.first_token = now if self.first_token is None else self.first_token

    def piece(self, piece: Piece, now: float) -> None:
        """One of the first choice."""
        if self.first_content is None and any(
            isinstance(part, Content) and part.text for part in piece.parts
        ):
            self.first_content = now
        if self.keeps:
            self.pieces.append(piece)


@dataclass(frozen=True)
class Arrived:
    """`request` is our own id of the call; `session` what its client calls it, "" if nothing.
    `raw`: the body as it came, where content is recorded."""

    request: str
    session: str
    tenant: str
    salt: str
    api: Api
    model: str
    tokens: list[int] = field(repr=False)
    tools: bool
    sampling: Sampling
    stream: bool
    choices: int
    raw: bytes | None = field(repr=False)


@dataclass(frozen=True)
class Over:
    """How it ended: of the first choice."""

    outcome: str
    finish: Finish | None
    output_tokens: int
    cached_tokens: int
    spec: Spec | None
    accepts: tuple[int, ...]
    attempts: tuple[Attempt, ...]
