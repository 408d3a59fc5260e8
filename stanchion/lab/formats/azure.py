"""Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; no hashes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from stanchion.core.errors import TraceError
from stanchion.core.recording import Header, Recorded, Times
from stanchion.lab.formats.lines import lines, tokens
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace, checked

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MICROSECONDS = 6


def read(path: Path, options: Options) -> Trace:
    origin = None
    for number, _, columns in _rows(path):
        origin = _moment(path, number, columns[0])
        break
    header = Header(source="azure", model="", level="none", origin_unix_s=origin)
    return Trace(header, lambda left_out: _requests(path, origin or 0.0))


def _rows(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """(line, row from 0, the three columns)."""
    places: list[int] = []
    for count, (number, raw) in enumerate(lines(path)):
        try:
            row = next(csv.reader([raw.decode("utf-8-sig").strip()]))
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError(path, number, f"not CSV: {error}") from None
        if not count:
            missing = [name for name in COLUMNS if name not in row]
            if missing:
                raise TraceError(path, number, f"there is no column {missing[0]}")
            places = [row.index(name) for name in COLUMNS]
        elif len(row) <= max(places):
            raise TraceError(path, number, f"{len(row)} columns; at least {max(places) + 1}")
        else:
            yield number, count - 1, [row[place] for place in places]


def _requests(path: Path, origin: float) -> Iterator[Recorded]:
    before = 0.0
    for number, row, (stamp, context, generated) in _rows(path):
        arrival = _moment(path, number, stamp) - origin
        if arrival < before:
            raise TraceError(path, number, "TIMESTAMP is before that of the line above")
        before = arrival
        output = _count(path, number, "GeneratedTokens", generated)
        one = Recorded(
            request=f"row-{row}",
            session=f"row-{row}",  # the format knows of none
            times=Times(arrival=arrival),
            input_tokens=_count(path, number, "ContextTokens", context),
            output_tokens=output,
            max_tokens=output,
        )
        yield checked(path, number, one, None)


def _count(path: Path, number: int, field: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise TraceError(path, number, f"{field} is {text[:20]!r}; it must be a number of tokens")
    return tokens(path, number, field, int(text))


def _moment(path: Path, number: int, text: str) -> float:
    """Seconds since 1970; without a zone it is UTC. Python reads microseconds, not finer."""
    whole, dot, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    zone = rest[len(digits) :]
    cut = f"{whole}{dot}{digits[:MICROSECONDS]}{zone}" if dot else text
    try:
        moment = datetime.fromisoformat(cut)
    except ValueError:
        raise TraceError(path, number, f"TIMESTAMP is {text[:40]!r}; it must be a date") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
