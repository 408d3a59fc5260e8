"""TraceLab's sanitised rounds of Claude Code and Codex: one round a line, no hashes.

A round is sent when the last of its input has come (a user's message, or a tool's result), and is
over with its last event. Rounds of a session stand together, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from stanchion.core.errors import TraceError
from stanchion.core.recording import Header, Recorded, Times
from stanchion.lab.formats.lines import decoded, lines
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace, checked

INPUT = ("user_message", "tool_result")
SAID = ("reasoning", "text", "tool_call")


class Event(Struct, frozen=True):
    event_type: str
    timestamp: datetime


class Round(Struct, frozen=True, kw_only=True):
    session_id: str
    round_index: int
    round_id: str
    input_tokens_total: int
    timing_events: list[Event]
    model: str = ""
    prefix_tokens: int | None = None
    output_tokens: int | None = None

    def moments(self, *kinds: str) -> list[float]:
        wanted = [one for one in self.timing_events if not kinds or one.event_type in kinds]
        return [one.timestamp.timestamp() for one in wanted]


def read(path: Path, options: Options) -> Trace:
    first = [min(one.moments()) for _, one in _rounds(path)]
    if not first:
        raise TraceError(path, None, "holds nothing")
    origin = min(first)
    header = Header(source="tracelab", model="", level="none", origin_unix_s=origin)
    return Trace(header, lambda left_out: _requests(path, origin))


def _rounds(path: Path) -> Iterator[tuple[int, Round]]:
    for number, raw in lines(path):
        one = decoded(path, number, raw, Round)
        if any(event.timestamp.tzinfo is None for event in one.timing_events):
            raise TraceError(path, number, "timing_events: a timestamp without a zone")
        if not one.moments(*INPUT):
            raise TraceError(path, number, "timing_events: nothing says when its input had come")
        yield number, one


def _requests(path: Path, origin: float) -> Iterator[Recorded]:
    ended: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for number, one in _rounds(path):
        arrival, said = max(one.moments(*INPUT)) - origin, one.moments(*SAID)
        if arrival < arrived.get(one.session_id, 0.0):
            raise TraceError(path, number, "timing_events: before those of the round above")
        arrived[one.session_id] = arrival
        before = ended.get(one.session_id)
        end = max(arrival, max(one.moments()) - origin)
        ended[one.session_id] = end
        made = Recorded(
            request=one.round_id,
            session=one.session_id,
            turn=one.round_index,
            think_s=None if before is None else max(0.0, arrival - before),
            model=one.model,
            times=Times(
                arrival=arrival,
                first_content=max(arrival, min(said) - origin) if said else None,
                end=end,
            ),
            input_tokens=one.input_tokens_total,
            output_tokens=one.output_tokens,
            cached_tokens=one.prefix_tokens,
            max_tokens=one.output_tokens,
        )
        yield checked(path, number, made, None)
