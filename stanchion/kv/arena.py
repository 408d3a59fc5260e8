"""The one run of memory that a pool lies in: private to this process, or open to its peers.

A shared arena is a memfd: it has no name on any disk and ends with its last user, however that
ends. Peers on this machine map it through /proc/PID/fd. Its first page holds a token drawn for it,
so that a reused pid or descriptor is found out; its size is sealed, so that no map of it can come
to reach past its end. What lies where is the layout's to say.

Memory goes back when the last view of it is gone: a view can never point at nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stanchion.core.errors import Bug
from stanchion.kv.transfer.words import TOKEN_BYTES, TransferError

HEADER_BYTES = 4096
MAGIC = b"stanchion arena\n"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Address:
    """How another process on this machine finds a shared arena."""

    pid: int
    descriptor: int
    size: int
    token: bytes


class Arena:
    """`memory` is what the layout describes: zeros at first, aligned to a page of the machine."""

    def __init__(self, memory: Bytes, address: Address | None = None) -> None:
        self._memory: Bytes | None = memory
        self._address = address

    @classmethod
    def private(cls, size: int) -> Arena:
        """Memory that only this process can reach."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, max(size, 1), flags=flags)
        return cls(np.frombuffer(mapped, np.uint8, size))

    @classmethod
    def shared(cls, size: int) -> Arena:
        descriptor = os.memfd_create("stanchion", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, HEADER_BYTES + size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        mapped = mmap.mmap(descriptor, HEADER_BYTES + size)
        token = secrets.token_bytes(TOKEN_BYTES)
        mapped[: len(MAGIC) + TOKEN_BYTES] = MAGIC + token
        memory = np.frombuffer(mapped, np.uint8, size, HEADER_BYTES)
        return cls(memory, Address(os.getpid(), descriptor, size, token))

    @property
    def memory(self) -> Bytes:
        if self._memory is None:
            raise Bug("an arena was used after it was closed")
        return self._memory

    @property
    def address(self) -> Address:
        if self._address is None:
            raise Bug("a private arena, or a closed one, has no address")
        return self._address

    def close(self) -> None:
        """Let go of it. Views may live on, and keep the memory for as long as they do."""
        if self._address is not None:
            os.close(self._address.descriptor)
        self._address = None
        self._memory = None


def attach(address: Address) -> Bytes:
    """Another process's arena, mapped into this one. It stays mapped while views of it live."""
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        # Looked at before it is opened: to open a device or a pipe can do things.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TransferError(f"{path} is no shared arena")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"cannot reach the peer's memory: {error}") from error
    try:
        return _map(descriptor, address)
    except OSError as error:
        raise TransferError(f"{path} is no shared arena: {error}") from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, address: Address) -> Bytes:
    size = HEADER_BYTES + address.size
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise TransferError("the peer's memory could shrink under our map of it")
    if os.fstat(descriptor).st_size != size:
        raise TransferError(f"the peer's memory is not of the {address.size} bytes that it said")
    mapped = mmap.mmap(descriptor, size)
    if mapped[: len(MAGIC) + TOKEN_BYTES] != MAGIC + address.token:
        raise TransferError(
            "the peer's memory bears another token: it is not the one it invited to"
        )
    return np.frombuffer(mapped, np.uint8, address.size, HEADER_BYTES)
