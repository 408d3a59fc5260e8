"""What a flight brings back. No tensors here: the loop draws conclusions from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stanchion.core.messages import TopToken
from stanchion.core.outcome import Outcome, OutputSuspect, Rejected
from stanchion.engine.ask import Chosen
from stanchion.engine.request import Ahead
from stanchion.engine.scheduler import Piece


@dataclass(frozen=True)
class Scores:
    logprobs: list[float]
    top: list[list[TopToken]]


@dataclass
class Landed:
    """What one piece came to."""

    piece: Piece
    drafts: list[int] = field(default_factory=list)
    suspect: str | None = None
    fault: str | None = None  # of its own grammar
    chosen: Chosen | None = None
    ahead: Ahead | None = None
    scores: Scores | None = None

    @property
    def failed(self) -> Outcome | None:
        if self.suspect is not None:
            return OutputSuspect(self.suspect)
        return None if self.fault is None else Rejected("grammar", self.fault)


@dataclass(frozen=True)
class Arrived:
    """The landing of a flight that was over when its launch returned, as on an inline queue."""

    landed: list[Landed]

    def wait(self) -> list[Landed]:
        return self.landed
