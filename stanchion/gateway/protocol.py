"""uvicorn's HTTP protocol with the one bound that it lacks: the size of a request's headers.

Without it, anybody who can connect could fill memory with a header that never ends, before any key
is asked for.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES_MAX = 256 * 2**10


class BoundedHeaders(HttpToolsProtocol):
    _heading = True
    _heading_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._heading_bytes += len(data)
        super().data_received(data)
        too_long = self._heading and self._heading_bytes > HEADER_BYTES_MAX
        if too_long and not self.transport.is_closing():
            self.send_400_response("Request headers are too long.")

    def on_message_begin(self) -> None:
        self._heading, self._heading_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._heading = False
        super().on_headers_complete()
