"""The folder of a recording: append, rotate, drop the oldest, never more than so many bytes.

A record is one line and one write, so a process that is killed leaves at most one torn line. What
a disk took in part is taken back, so a line never begins in the middle of another.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stanchion.core.errors import ConfigError
from stanchion.core.recording import HEADER, SEGMENTS, Header

SEGMENT_BYTES_MAX = 64 * 2**20
SEGMENTS_LEAST = 8  # the oldest is no more than so much of the whole
EARLIER = "earlier-*"


class Files:
    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Raise ConfigError if nothing can be written there. A recording that the folder holds
        already is moved to a folder inside it, and counts against the bound."""
        self._folder = folder
        self._bytes_max = bytes_max
        self._segment_max = min(SEGMENT_BYTES_MAX, bytes_max // SEGMENTS_LEAST)
        self._number = 0
        self._stream: int | None = None
        self._size = 0  # of the newest segment
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._set_aside()
            found = sorted(folder.glob(f"{EARLIER}/{SEGMENTS}"))
            self._kept = {path: path.stat().st_size for path in found}
            (folder / ".writable").write_bytes(b"")
            (folder / ".writable").unlink()
        except OSError as error:
            raise ConfigError(f"record: cannot write to {folder}: {error}") from None

    def _set_aside(self) -> None:
        found = [*sorted(self._folder.glob(SEGMENTS)), *self._folder.glob(HEADER)]
        if not found:
            return
        count = len(list(self._folder.glob(EARLIER)))
        aside = self._folder / EARLIER.replace("*", f"{count + 1:06}")
        aside.mkdir(mode=0o700)
        for path in found:
            path.rename(aside / path.name)

    def header(self, header: Header) -> None:
        """Raise OSError."""
        stream = os.open(self._folder / HEADER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(stream, msgspec.json.encode(header) + b"\n")
        finally:
            os.close(stream)

    def append(self, line: bytes) -> int:
        """How many segments were dropped for it. Raise OSError; then nothing was written."""
        if len(line) > self._segment_max:
            raise OSError(f"a record of {len(line)} bytes; a segment has {self._segment_max}")
        if self._stream is None or self._size + len(line) > self._segment_max:
            self._rotate()
        assert self._stream is not None
        dropped = self._make_room(len(line))
        try:
            written = os.write(self._stream, line)
            if written < len(line):
                raise OSError(f"the disk took {written} of {len(line)} bytes")
        except OSError:
            os.ftruncate(self._stream, self._size)
            raise
        self._size += len(line)
        return dropped

    def _rotate(self) -> None:
        self.close()
        path = self._folder / SEGMENTS.replace("*", f"{self._number + 1:06}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._stream = os.open(path, flags, 0o600)
        self._number += 1
        self._size = 0

    def _make_room(self, size: int) -> int:
        dropped = 0
        while self._kept and sum(self._kept.values()) + self._size + size > self._bytes_max:
            oldest = next(iter(self._kept))
            oldest.unlink(missing_ok=True)
            del self._kept[oldest]
            dropped += 1
        return dropped

    def close(self) -> None:
        """What was appended stays."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None
            path = self._folder / SEGMENTS.replace("*", f"{self._number:06}")
            self._kept[path] = self._size
