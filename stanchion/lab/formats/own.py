"""A recording of ours: a folder with `header.json` and segments of one `Recorded` a line.

The last line of a segment may be torn: whoever wrote it was killed. It is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from stanchion.core.errors import TraceError
from stanchion.core.recording import FORMAT, HEADER, SEGMENTS, Header, Recorded
from stanchion.lab.formats.lines import decoded, lines
from stanchion.lab.formats.trace import Trace, checked

SEGMENT_BYTES = 64 * 2**20


def read(folder: Path) -> Trace:
    path = folder / HEADER
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(folder, None, f"is no recording: {HEADER} is not in it") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error}") from None
    header = decoded(path, None, raw, Header)
    if header.format != FORMAT:
        raise TraceError(path, None, f"format is {header.format}; this program reads {FORMAT}")
    if header.block_tokens is not None and header.block_tokens < 1:
        raise TraceError(path, None, f"block_tokens is {header.block_tokens}; at least 1")
    return Trace(header, lambda left_out: _requests(folder, header, left_out))


def _requests(folder: Path, header: Header, left_out: Callable[[int], None]) -> Iterator[Recorded]:
    for path in sorted(folder.glob(SEGMENTS)):
        for number, line in lines(path):
            if not line.endswith(b"\n"):
                left_out(1)
                continue
            one = decoded(path, number, line, Recorded)
            yield checked(path, number, one, header.block_tokens)


def write(folder: Path, header: Header, requests: Iterable[Recorded]) -> int:
    """How many were written. Raise TraceError where the folder holds something already."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise TraceError(folder, None, f"cannot be a folder: {error.strerror}") from None
    if any(folder.iterdir()):
        raise TraceError(
            folder, None, "is not empty; a recording is written to a folder of its own"
        )
    (folder / HEADER).write_bytes(msgspec.json.encode(header) + b"\n")
    count = 0
    with _Segments(folder) as writer:
        for one in requests:
            writer.write(msgspec.json.encode(one) + b"\n")
            count += 1
    return count


class _Segments:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._next()

    def _next(self) -> None:
        self._number += 1
        self._size = 0
        self._stream = (self._folder / SEGMENTS.replace("*", f"{self._number:06}")).open("wb")

    def write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > SEGMENT_BYTES:
            self._stream.close()
            self._next()
        self._stream.write(line)
        self._size += len(line)

    def __enter__(self) -> _Segments:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
