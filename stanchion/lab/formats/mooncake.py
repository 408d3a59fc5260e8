"""Mooncake traces (FAST'25): one request a line, in order of arrival.

`timestamp` in milliseconds from the trace's start, `input_length`, `output_length`, `hash_ids`: one
for each block of 512 tokens, the last of which may be partial. Files in seconds exist too; what
cannot be milliseconds is refused unless the reader is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from stanchion.core.errors import TraceError
from stanchion.core.recording import Header, Recorded, Times
from stanchion.lab.formats.coarse import Coarsened, coarsened
from stanchion.lab.formats.lines import SECONDS_MAX, decoded, lines, written
from stanchion.lab.formats.options import Options
from stanchion.lab.formats.trace import Trace, checked

BLOCK_TOKENS = 512
RATE_MAX = 2000.0  # requests a second on average: faster, and milliseconds were seconds
RATE_LEAST = 100  # requests before a rate means anything
UNITS = {"ms": 1000.0, "s": 1.0}
HashId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Line(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[HashId]


def read(path: Path, options: Options) -> Trace:
    block_tokens = options.block_tokens or BLOCK_TOKENS
    header = Header(source="mooncake", model="", block_tokens=block_tokens, level="hashes")
    return Trace(header, lambda left_out: _requests(path, options, block_tokens))


def _requests(path: Path, options: Options, block_tokens: int) -> Iterator[Recorded]:
    before, unit = -inf, options.unit or "ms"
    for count, (number, raw) in enumerate(lines(path)):
        said = decoded(path, number, raw, Line)
        _check_unit(path, number, said.timestamp, count, options.unit)
        arrival = said.timestamp / UNITS[unit]
        if arrival < before:
            raise TraceError(path, number, "timestamp is before that of the line above")
        before = arrival
        wanted = -(-said.input_length // block_tokens)
        if len(said.hash_ids) != wanted:
            raise TraceError(
                path,
                number,
                f"hash_ids has {len(said.hash_ids)} of them; {said.input_length} tokens in blocks "
                f"of {block_tokens} have {wanted} (other sizes: --block-tokens)",
            )
        yield checked(path, number, _recorded(number, said, arrival, block_tokens), block_tokens)


def _check_unit(path: Path, number: int, stamp: float, count: int, unit: str | None) -> None:
    if stamp > SECONDS_MAX * UNITS[unit or "ms"]:
        words = "it must count from the trace's start, and seems to count from 1970"
        raise TraceError(path, number, f"timestamp is {stamp:.0f}; {words}")
    if unit is not None:
        return
    if not stamp.is_integer():
        words = "milliseconds have no fraction; if these are seconds, say --unit s"
        raise TraceError(path, number, f"timestamp is {stamp}; {words}")
    if count >= RATE_LEAST and count / max(stamp, 1.0) * 1000 > RATE_MAX:
        rate = count / max(stamp, 1.0) * 1000
        words = f"as milliseconds that would be {rate:.0f} requests a second"
        raise TraceError(path, number, f"timestamp: {words}; if these are seconds, say --unit s")


def _recorded(number: int, said: Line, arrival: float, block_tokens: int) -> Recorded:
    whole, rest = divmod(max(said.input_length, 0), block_tokens)
    names = [f"{one:016x}" for one in said.hash_ids]
    return Recorded(
        request=f"line-{number}",
        session=f"line-{number}",  # the format knows of none
        times=Times(arrival=arrival),
        input_tokens=said.input_length,
        output_tokens=said.output_length,
        max_tokens=said.output_length,
        blocks=tuple(names[:whole]),
        tail_tokens=rest,
        tail=names[whole] if rest else None,
    )


def write(path: Path, trace: Iterable[Recorded], header: Header, block_tokens: int) -> Coarsened:
    """In order of arrival, from 0. Raise TraceError where the blocks cannot be so large."""
    found = sorted(trace, key=lambda one: one.times.arrival)
    book = Coarsened(path, header, block_tokens)
    first = found[0].times.arrival if found else 0.0
    with written(path) as stream:
        for one in found:
            line = {
                "timestamp": round((one.times.arrival - first) * 1000),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens or 0,
                "hash_ids": coarsened(book, one, tail=True),
            }
            stream.write(msgspec.json.encode(line) + b"\n")
    return book
