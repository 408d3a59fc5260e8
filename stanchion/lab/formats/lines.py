"""Lines of a trace file, plain or gzip, and JSON in them: data only, bounded, with file:line.

Nothing here deserialises objects, and no length in a file is believed: a line that is longer than
`LINE_BYTES_MAX` is an error before it is memory.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from stanchion.core.errors import TraceError

LINE_BYTES_MAX = 256 * 2**20
GZIP = b"\x1f\x8b"
TOKENS_MAX = 2**31 - 1
SECONDS_MAX = 10.0 * 366 * 86400  # of a trace's own clock
Read = TypeVar("Read")


class Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...
    def readline(self, size: int = -1, /) -> bytes: ...


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """The file's bytes, unpacked where they are gzip. Raise TraceError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            if not packed:
                yield raw
                return
            with gzip.open(raw) as unpacked:
                yield unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, None, f"cannot be read: {error}") from None


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """The file, to be written anew. Raise TraceError where it cannot be."""
    try:
        stream = path.open("wb")
    except OSError as error:
        raise TraceError(path, None, f"cannot be written: {error.strerror}") from None
    with stream:
        yield stream


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line that is not empty; the last may lack its line break."""
    with opened(path) as stream:
        number = 0
        while line := stream.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(line) > LINE_BYTES_MAX:
                raise TraceError(path, number, f"a line of more than {LINE_BYTES_MAX} bytes")
            if line.strip():
                yield number, line


def decoded(path: Path, number: int | None, raw: bytes, kind: type[Read]) -> Read:
    """One JSON value of that type. Raise TraceError that names the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(path, number, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, number, f"not valid JSON: {error}") from None
    except RecursionError:
        raise TraceError(path, number, "nested too deeply") from None


def seconds(path: Path, number: int, field: str, value: float) -> float:
    if not (isfinite(value) and 0 <= value <= SECONDS_MAX):
        raise TraceError(path, number, f"{field} is {value}; it must be from 0 to {SECONDS_MAX:g}")
    return value


def tokens(path: Path, number: int, field: str, value: int) -> int:
    if not 0 <= value <= TOKENS_MAX:
        raise TraceError(path, number, f"{field} is {value}; it must be from 0 to {TOKENS_MAX}")
    return value
