"""The thread queue: in order, at its own pace, and loud when something breaks."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from stanchion.core.errors import Bug
from stanchion.device.cpu import InlineQueue, ThreadQueue
from stanchion.device.stream import Guarded, Stream
from stanchion.sim.late import LateQueue

WAIT_S = 20.0


def test_jobs_run_in_order_and_marks_pass_with_them() -> None:
    queue, done, gate = ThreadQueue("test"), [], threading.Event()

    def slow() -> None:
        assert gate.wait(WAIT_S)

    queue.submit(slow)
    marks = [queue.submit(lambda at=at: done.append(at)) for at in range(5)]  # type: ignore[misc]
    assert not queue.passed(marks[0]) and done == []
    gate.set()
    queue.finish(marks[-1])
    assert done == [0, 1, 2, 3, 4] and all(queue.passed(mark) for mark in marks)
    queue.close()


def test_a_reader_waits_for_the_thread_that_writes() -> None:
    """The inline stream stands still at a door; the value is there when it opens."""
    queue, gate, value = ThreadQueue("test"), threading.Event(), [0]
    guarded = Guarded("value", value)
    pages = np.array([1], np.int32)

    def write() -> None:
        assert gate.wait(WAIT_S)
        value[0] = 1

    with Stream("load", queue).writing(guarded, pages):
        queue.submit(write)
    threading.Timer(0.01, gate.set).start()
    with Stream("compute", InlineQueue()).reading(guarded, pages) as view:
        assert view.rows == [1]
    queue.close()


def test_one_queue_waits_for_another() -> None:
    first, second, gate = ThreadQueue("first"), ThreadQueue("second"), threading.Event()
    order: list[str] = []

    def slow() -> None:
        assert gate.wait(WAIT_S)
        order.append("first")

    mark = first.submit(slow)
    second.wait(first, mark)
    end = second.submit(lambda: order.append("second"))
    gate.set()
    second.finish(end)
    assert order == ["first", "second"]
    first.close()
    second.close()


def test_a_job_that_fails_is_a_bug_for_whoever_asks() -> None:
    queue = ThreadQueue("test")

    def fails() -> None:
        raise ValueError("no")

    mark = queue.submit(fails)
    with pytest.raises(Bug, match="ValueError"):
        queue.finish(mark)
    with pytest.raises(Bug, match="ValueError"):
        queue.passed(mark)
    queue.close()


def test_what_was_never_submitted_is_not_waited_for() -> None:
    for queue in (ThreadQueue("test"), LateQueue()):
        with pytest.raises(Bug, match="never submitted"):
            queue.finish(1)
        queue.close()


def test_a_closed_queue_takes_nothing_and_lets_waiters_go() -> None:
    queue, begun, gate = ThreadQueue("test"), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert gate.wait(WAIT_S)

    queue.submit(slow)
    later = queue.submit(lambda: None)
    assert begun.wait(WAIT_S)
    said: list[str] = []

    def waits() -> None:
        try:
            queue.finish(later)
        except Bug as error:
            said.append(str(error))

    waiter = threading.Thread(target=waits)
    waiter.start()
    threading.Timer(0.01, gate.set).start()
    queue.close()
    waiter.join(WAIT_S)
    assert said == ["a queue was closed while somebody waited for its work"]
    with pytest.raises(Bug, match="closed"):
        queue.submit(lambda: None)
