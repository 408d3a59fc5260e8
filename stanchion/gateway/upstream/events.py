"""Server-sent events, read from bytes as they come. Pure.

Promises: the events are the same for every way the bytes are cut; a line is bounded, and beyond
its bound nothing is kept. What is not `data` (comments, names of events) is passed over: none of
the servers here says anything in it.
"""

from __future__ import annotations

from stanchion.core.outcome import PeerLost
from stanchion.gateway.upstream.wire import Wrong

DONE = b"[DONE]"


class Events:
    def __init__(self, line_bytes_max: int) -> None:
        self._most = line_bytes_max
        self._rest = bytearray()
        self._searched = 0

    def push(self, more: bytes) -> list[bytes]:
        """Raise Wrong once a line is too long."""
        self._rest += more
        found: list[bytes] = []
        first = 0
        while (end := self._rest.find(b"\n", max(first, self._searched))) >= 0:
            self._bounded(end - first)
            line = bytes(self._rest[first:end]).removesuffix(b"\r")
            if line.startswith(b"data:"):
                found.append(line[5:].strip())
            first = end + 1
        del self._rest[:first]
        self._searched = len(self._rest)
        self._bounded(len(self._rest))
        return found

    def _bounded(self, length: int) -> None:
        if length > self._most:
            raise Wrong(PeerLost(f"the server said a line of more than {self._most} bytes"))
