"""Chained block hashes as small numbers of larger blocks, for formats that want these. Pure.

A chained hash stands for the whole prefix, so a larger block is named by the last small one in it.
Sharing within a larger block is lost: that is the coarsening, and its size is stated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stanchion.core.errors import TraceError
from stanchion.core.recording import Header, Recorded


@dataclass
class Coarsened:
    """What a writer did. `unshared`: partial last blocks of which nobody knows the hash; each got
    a number of its own."""

    path: Path
    header: Header
    block_tokens: int
    unshared: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    issued: int = 0

    def __post_init__(self) -> None:
        size = self.header.block_tokens
        if size is None:
            raise TraceError(self.path, None, "this format wants block hashes; the trace has none")
        if self.block_tokens < size or self.block_tokens % size:
            raise TraceError(
                self.path,
                None,
                f"blocks of {size} tokens cannot be written as blocks of {self.block_tokens}: "
                f"it must be a multiple",
            )

    def number(self, name: str) -> int:
        if name not in self.ids:
            self.ids[name] = self.fresh()
        return self.ids[name]

    def fresh(self) -> int:
        self.issued += 1
        return self.issued - 1


def coarsened(book: Coarsened, one: Recorded, tail: bool) -> list[int]:
    """The numbers of its whole larger blocks, and of the rest where `tail` is wanted."""
    assert book.header.block_tokens is not None
    step = book.block_tokens // book.header.block_tokens
    numbers = [book.number(name) for name in one.blocks[step - 1 :: step]]
    rest = one.input_tokens - len(numbers) * book.block_tokens
    if not tail or not rest:
        return numbers
    small = one.blocks[len(numbers) * step :]
    if one.tail_tokens and one.tail is None:
        book.unshared += 1
        return [*numbers, book.fresh()]
    # Named by all of it, so that it is shared by equal prompts alone.
    last = one.tail if one.tail_tokens and one.tail is not None else small[-1]
    return [*numbers, book.number(f"{rest}:{last}")]
