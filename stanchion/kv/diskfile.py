"""KV pages in files: what one looks like, how it is written whole or not at all, how it is read.

A file holds some successive pages of one prefix, and is called after the key of its last one:

    magic, version, length of the header | header | xxh3 of all before | zeros to a multiple of 4096
    the pages, one after another, page_bytes each

It is written under another name, made durable, and renamed: so a file of that name is whole, as
far as a disk can be trusted. What is read is checked all the same, header and page each by its own
xxh3; whatever is short, torn or of another kind is not a hit. No thread and no index here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct
from numpy.typing import NDArray

from stanchion.core.errors import ConfigError
from stanchion.core.identity import DIGEST_BYTES
from stanchion.kv.record import Record

MAGIC = b"stanchkv"
VERSION = 1
ALIGNMENT = 4096
START_BYTES = len(MAGIC) + 8
HASH_BYTES = 8
OBJECT_PAGES = 64
HEADER_BYTES_MAX = 2**24
SUFFIX, UNFINISHED = ".kv", ".tmp"
Bytes = NDArray[np.uint8]
Key = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class PageHead(Struct, frozen=True, array_like=True):
    key: Key
    root: Key
    tokens: Annotated[bytes, Meta(max_length=2**20)]
    digests: Annotated[bytes, Meta(max_length=2**20)]
    xxh3: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class Header(Struct, frozen=True):
    schema: Annotated[str, Meta(max_length=256)]
    page_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    pages: Annotated[list[PageHead], Meta(min_length=1, max_length=OBJECT_PAGES)]


_decode = msgspec.msgpack.Decoder(Header).decode


class Misfit(Exception):
    """A file, or a page of one, that is not what it should be; the words say how."""


@dataclass(frozen=True)
class Object:
    """One file. `offset`: where its first page begins."""

    path: Path
    header: Header
    offset: int
    size: int


def path_of(folder: Path, key: bytes) -> Path:
    return folder / (key.hex() + SUFFIX)


def lock(folder: Path) -> int:
    """Make the folder this process's own, until the descriptor is closed. Raise ConfigError where
    another has it, OSError where it cannot be written."""
    folder.mkdir(0o700, parents=True, exist_ok=True)  # prompts are in it
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another process keeps its KV in {folder}") from None
    except OSError:
        os.close(descriptor)
        raise
    for left in folder.glob("*" + UNFINISHED):
        remove(left)
    return descriptor


def unlock(descriptor: int) -> None:
    os.close(descriptor)


def encoded(schema: str, page_bytes: int, pages: Sequence[tuple[Record, bytes]]) -> bytes:
    """What stands before the pages; with each record, its payload's xxh3."""
    heads = [PageHead(one.key, one.root, one.tokens, one.digests, xxh3) for one, xxh3 in pages]
    header = msgspec.msgpack.encode(Header(schema, page_bytes, heads))
    said = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    said += xxhash.xxh3_64_digest(said)
    return said + bytes(-len(said) % ALIGNMENT)


def size_of(schema: str, records: Sequence[Record], page_bytes: int) -> int:
    """How large the file of these pages is."""
    nothing = [(one, bytes(HASH_BYTES)) for one in records]
    return len(encoded(schema, page_bytes, nothing)) + page_bytes * len(records)


def write(folder: Path, schema: str, pages: Sequence[tuple[Record, Bytes]]) -> Object:
    """Raise OSError, and leave nothing behind."""
    hashed = [(one, xxhash.xxh3_64_digest(payload.data)) for one, payload in pages]
    page_bytes = len(pages[0][1])
    head = encoded(schema, page_bytes, hashed)
    path = path_of(folder, pages[-1][0].key)
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with open(unfinished, "wb", buffering=0) as file:
            for part in (memoryview(head), *(payload.data for _, payload in pages)):
                _write_all(file.fileno(), part)
            os.fsync(file.fileno())
        os.rename(unfinished, path)
        _sync_folder(folder)
    except OSError:
        remove(unfinished)
        remove(path)
        raise
    return Object(path, _header(head)[0], len(head), len(head) + page_bytes * len(pages))


def scan(folder: Path, schema: str, page_bytes: int) -> Iterator[tuple[Path, Object | None]]:
    """Every file of pages, the longest untouched first; None for one that is of no use here."""
    found = [one for one in os.scandir(folder) if one.name.endswith(SUFFIX)]
    for one in sorted(found, key=lambda one: one.stat(follow_symlinks=False).st_mtime_ns):
        path = Path(one.path)
        try:
            if not one.is_file(follow_symlinks=False):
                raise Misfit("no file of ours")  # a pipe would keep us for ever
            yield path, _look(path, schema, page_bytes)
        except (Misfit, OSError):
            yield path, None


def read_page(file: int, object: Object, place: int, into: Bytes) -> None:
    """One page, checked. Raise Misfit or OSError; then what is in `into` is nothing."""
    at = object.offset + place * object.header.page_bytes
    done = 0
    view = memoryview(into.data)
    while done < len(into):
        count = os.preadv(file, [view[done:]], at + done)
        if not count:
            raise Misfit(f"page {place} is short")
        done += count
    if xxhash.xxh3_64_digest(into.data) != object.header.pages[place].xxh3:
        raise Misfit(f"page {place} is not what was written")


def remove(path: Path) -> None:
    """As far as the disk lets us: what stays is found, and looked at, at the next start."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _look(path: Path, schema: str, page_bytes: int) -> Object:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(START_BYTES)
        length = int.from_bytes(start[-4:], "little")
        if len(start) < START_BYTES or length > min(HEADER_BYTES_MAX, size):
            raise Misfit("the header is short")
        said = start + file.read(length + HASH_BYTES)
    header, end = _header(said)
    if header.schema != schema or header.page_bytes != page_bytes:
        raise Misfit("pages of another schema")
    offset = end + (-end % ALIGNMENT)
    if size != offset + page_bytes * len(header.pages):
        raise Misfit("its size is not what its header says")
    if path.name != header.pages[-1].key.hex() + SUFFIX:
        raise Misfit("it has another's name")
    return Object(path, header, offset, size)


def _header(said: bytes) -> tuple[Header, int]:
    """(the header, the end of it and its hash)."""
    length = int.from_bytes(said[len(MAGIC) + 4 : START_BYTES], "little")
    end = START_BYTES + length
    if said[: len(MAGIC)] != MAGIC or said[len(MAGIC) :][:4] != VERSION.to_bytes(4, "little"):
        raise Misfit("no KV pages of this version")
    if said[end : end + HASH_BYTES] != xxhash.xxh3_64_digest(said[:end]):
        raise Misfit("its header is not what was written")
    try:
        return _decode(said[START_BYTES:end]), end + HASH_BYTES
    except msgspec.MsgspecError as error:
        raise Misfit(f"its header does not parse: {error}") from None


def _write_all(file: int, view: memoryview) -> None:
    view = view.cast("B")
    while len(view):
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
