"""The one way from the pool to a transfer: through the doors of the pages that are sent.

So a write begins after the pages' last writer, and their next writer waits for its end.
"""

from __future__ import annotations

from stanchion.device.stream import Stream
from stanchion.kv.store import Store
from stanchion.kv.transfer.words import Transfer, Write


class Sender:
    def __init__(self, store: Store, transfer: Transfer) -> None:
        self._store = store
        self._transfer = transfer
        self._stream = Stream("send", transfer)

    def send(self, write: Write) -> None:
        index = self._store.behind(write.layer, "index")
        attend = self._store.behind(write.layer, "attend")
        pages = write.source
        with self._stream.reading(index, pages), self._stream.reading(attend, pages):
            self._transfer.submit(write)
