"""A trace that can be read any number of times, one request after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stanchion.core.errors import TraceError
from stanchion.core.recording import Header, Recorded
from stanchion.lab.formats.lines import seconds, tokens

# Each reader gets the function to call with the number of lines that it had to leave out.
Make = Callable[[Callable[[int], None]], Iterator[Recorded]]


class Trace:
    """`header`, and its requests: iterate as often as wanted. Raise TraceError on the way.

    `torn`: lines that the last iteration left out, since a crash had cut them short.
    """

    def __init__(self, header: Header, make: Make) -> None:
        self.header = header
        self.torn = 0
        self._make = make

    def __iter__(self) -> Iterator[Recorded]:
        self.torn = 0
        return self._make(self._left_out)

    def _left_out(self, count: int) -> None:
        self.torn += count


def checked(path: Path, number: int, one: Recorded, block_tokens: int | None) -> Recorded:
    """The request as it came, if it makes sense. Raise TraceError that names the field."""
    times = one.times
    seconds(path, number, "times.arrival", times.arrival)
    for name in ("send", "first_byte", "first_token", "first_content", "end"):
        value = getattr(times, name)
        if value is not None and seconds(path, number, f"times.{name}", value) < times.arrival:
            raise TraceError(path, number, f"times.{name} is {value}, before the arrival")
    if one.think_s is not None:
        seconds(path, number, "think_s", one.think_s)
    if one.aborted is not None:
        seconds(path, number, "aborted.at_s", one.aborted.at_s)
        tokens(path, number, "aborted.after_tokens", one.aborted.after_tokens)
    for name in ("input_tokens", "output_tokens", "cached_tokens", "max_tokens", "turn"):
        if (count := getattr(one, name)) is not None:
            tokens(path, number, name, count)
    _check_blocks(path, number, one, block_tokens)
    return one


def _check_blocks(path: Path, number: int, one: Recorded, block_tokens: int | None) -> None:
    if block_tokens is None:
        if one.blocks or one.tail is not None:
            raise TraceError(path, number, "blocks: there are some, but the header names no size")
        return
    covered = len(one.blocks) * block_tokens + one.tail_tokens
    if not 0 <= one.tail_tokens < block_tokens or covered != one.input_tokens:
        raise TraceError(
            path,
            number,
            f"blocks: {len(one.blocks)} of {block_tokens} tokens and a tail of {one.tail_tokens} "
            f"are {covered} tokens, but input_tokens is {one.input_tokens}",
        )
