"""The evidence that a peer on this machine writes no more: its process has ended.

A map of our memory in another process cannot be revoked; only that process's end takes it away.
The kernel says so on a pidfd, after the process's memory is gone: a stopped process, a silent one
or one whose socket closed has not ended. So a pidfd is the whole fence of the shm backend.

Open the watch before the peer is first invited, and hear from the peer once more after that: else
its pid could already belong to another process.
"""

from __future__ import annotations

import os
import select


class Watch:
    """`fileno` is readable once the process has ended, for ever."""

    def __init__(self, pid: int) -> None:
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already: something that is readable, for ever
            self._descriptor = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self._descriptor)
