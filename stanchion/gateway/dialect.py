"""What an API is to the life of a request: how it writes answers and errors, and nothing else.

One `Generation` serves all APIs. What it starts, follows and lets go of is the same for each; the
bytes that a client sees are written by the `Writer` of the API that it called. Writers are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stanchion.core.errors import ServeError
from stanchion.core.messages import PromptScores
from stanchion.gateway.choice import ChoiceFold, Piece
from stanchion.gateway.openai import Ask

Headers = list[tuple[bytes, bytes]]


class Writer(Protocol):
    """Writes one answer: whole, or streamed as `opening`, any number of `delta`s, one `final` a
    choice, and `done`. `final`, `done` and `whole` raise Bug where a choice has not ended well."""

    def opening(self) -> bytes:
        """Before any token of the answer."""

    def delta(self, index: int, piece: Piece) -> bytes:
        """What is new of one choice; empty where the client would see nothing."""

    def final(self, index: int) -> bytes:
        """How that choice ended."""

    def done(self) -> bytes:
        """The stream's mark of success."""

    def idle(self) -> bytes:
        """Says in the middle of a stream that the server lives; empty if the API has no such."""

    def whole(self, pieces: Sequence[Piece], scores: Sequence[PromptScores | None]) -> bytes: ...


class Dialect(Protocol):
    def writer(self, ask: Ask, request: str, created: int, folds: Sequence[ChoiceFold]) -> Writer:
        """`request` is our own id of the call, `created` in seconds since 1970. `folds` are the
        choices, read for usage, acceptance and how they ended."""

    def error(self, error: ServeError, request: str) -> Any:
        """The body of a reply that is an error."""

    def failed(self, error: ServeError, request: str) -> bytes:
        """The last event of a stream that did not end well."""

    def marks(self, request: str) -> Headers:
        """Headers of its own, on each reply."""
