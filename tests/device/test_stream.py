"""Whatever order the device picks, a read sees the write before it in the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest

from stanchion.core.errors import Bug
from stanchion.device.stream import Guarded, Pages, Queue, Stream, View
from stanchion.sim.choices import Choices, every

ONE: Pages = np.array([1], np.int32)
TWO: Pages = np.array([2], np.int32)
BOTH: Pages = np.array([1, 2], np.int32)
Cells = dict[int, int]


@dataclass(eq=False)
class SimQueue:
    """A queue whose work is done when the choices say, but never before what it waits for."""

    ops: list[Callable[[], bool]] = field(default_factory=list)
    done: int = 0

    def launch(self, kernel: Callable[[], None]) -> None:
        self.ops.append(lambda: kernel() is None)

    def mark(self) -> int:
        return len(self.ops)

    def wait(self, other: Queue, mark: int) -> None:
        self.ops.append(lambda: other.passed(mark))

    def passed(self, mark: int) -> bool:
        return self.done >= mark

    def finish(self, mark: int) -> None:
        raise AssertionError("nobody waits for this queue by standing still")

    def step(self) -> bool:
        if self.done == len(self.ops) or not self.ops[self.done]():
            return False
        self.done += 1
        return True


def run(queues: list[SimQueue], choices: Choices) -> None:
    while left := [queue for queue in queues if queue.done < len(queue.ops)]:
        order = [left.pop(choices.pick(len(left))) for _ in range(len(left))]
        assert any(queue.step() for queue in order), "a queue waits for ever"


Step = tuple[int, str, int]  # stream, "r" or "w", page


def play(program: tuple[Step, ...], choices: Choices, doors: bool = True) -> list[tuple[int, int]]:
    """Run it; return, for each read, what it saw and what it should have seen."""
    streams = [Stream(f"s{at}", SimQueue()) for at in range(2)]
    cells: Cells = {1: 0, 2: 0}
    guarded = Guarded("cells", cells)
    latest, expected, seen = {1: 0, 2: 0}, [], {}
    for at, (which, kind, page) in enumerate(program):
        stream, pages = streams[which], np.array([page], np.int32)
        queue = stream.queue
        assert isinstance(queue, SimQueue)
        door: AbstractContextManager[View[Cells]] = (
            (stream.writing if kind == "w" else stream.reading)(guarded, pages)
            if doors
            else nullcontext(View("cells", cells))
        )
        with door as view:
            rows = view.rows
            if kind == "w":
                latest[page] = at + 1
                queue.launch(lambda rows=rows, page=page, value=at + 1: rows.update({page: value}))
            else:
                expected.append((at, latest[page]))
                queue.launch(lambda rows=rows, page=page, at=at: seen.update({at: rows[page]}))
    run([stream.queue for stream in streams if isinstance(stream.queue, SimQueue)], choices)
    return [(seen[at], value) for at, value in expected]


OPS: list[Step] = list(itertools.product((0, 1), "rw", (1, 2)))


def test_every_short_program_in_every_order() -> None:
    runs = 0
    for program in itertools.product(OPS, repeat=3):
        for choices in every(limit=5000):
            runs += 1
            assert all(saw == should for saw, should in play(program, choices)), program
    print(runs, "runs")


def test_without_the_doors_a_read_comes_before_its_write() -> None:
    results = [play(((0, "w", 1), (1, "r", 1)), choices, doors=False) for choices in every(100)]
    assert [(0, 1)] in results


def test_without_the_doors_a_load_overtakes_a_reader() -> None:
    program = ((0, "w", 1), (0, "r", 1), (1, "w", 1))
    results = [play(program, choices, doors=False) for choices in every(100)]
    assert any(saw != should for result in results for saw, should in result)


@pytest.mark.parametrize("forgotten", ["_writes", "_reads"])
def test_a_door_that_forgets_a_mark_is_caught(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Stream.follow

    def follow(self: Stream, accesses: list[object], pages: Pages) -> None:
        if accesses is not getattr(guard[0], forgotten):
            right(self, accesses, pages)  # type: ignore[arg-type]

    guard: list[object] = []
    create = Guarded.__init__

    def remember(self: Guarded[Cells], name: str, value: Cells) -> None:
        create(self, name, value)
        guard[:] = [self]

    monkeypatch.setattr(Guarded, "__init__", remember)
    monkeypatch.setattr(Stream, "follow", follow)
    wrong = any(
        saw != should
        for program in itertools.product(OPS, repeat=3)
        for choices in every(limit=5000)
        for saw, should in play(program, choices)
    )
    assert wrong


def test_pages_that_do_not_meet_do_not_wait() -> None:
    load, compute = Stream("load", SimQueue()), Stream("compute", SimQueue())
    guarded: Guarded[Cells] = Guarded("cells", {})
    assert isinstance(load.queue, SimQueue) and isinstance(compute.queue, SimQueue)
    with load.writing(guarded, ONE) as view:
        load.queue.launch(lambda rows=view.rows: rows.update({1: 1}))
    with compute.reading(guarded, TWO):
        assert compute.queue.ops == []
    with compute.reading(guarded, BOTH):
        assert len(compute.queue.ops) == 1  # it waits for the load of page 1


def test_a_view_dies_with_its_door() -> None:
    stream = Stream("compute", SimQueue())
    guarded: Guarded[Cells] = Guarded("layer 3 index", {})
    with stream.reading(guarded, ONE) as view:
        assert view.rows == {}
    with pytest.raises(Bug, match="view of layer 3 index was used after its door closed"):
        _ = view.rows


@pytest.mark.parametrize("outer, inner", [("reading", "writing"), ("writing", "reading")])
def test_a_door_inside_a_conflicting_one_is_a_bug(outer: str, inner: str) -> None:
    stream, other = Stream("compute", SimQueue()), Stream("load", SimQueue())
    guarded: Guarded[Cells] = Guarded("cells", {})
    with (
        getattr(stream, outer)(guarded, BOTH),
        pytest.raises(Bug, match="inside a conflicting one"),
        getattr(other, inner)(guarded, ONE),
    ):
        pass
    with stream.reading(guarded, ONE), other.reading(guarded, ONE):
        pass  # two readers are no conflict
