"""A descriptor that is readable from `ring` to `clear`, for any thread: an eventfd."""

from __future__ import annotations

import os


class Bell:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return  # it was silent

    def close(self) -> None:
        os.close(self._descriptor)
