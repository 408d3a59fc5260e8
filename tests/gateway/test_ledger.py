"""What is in flight: each request ends once, for its reader and in the table."""

from __future__ import annotations

from itertools import permutations

import pytest

from stanchion.core.errors import Bug
from stanchion.core.messages import Ended, Spec, Tokens
from stanchion.core.outcome import Cancelled, Completed, PeerLost
from stanchion.gateway.ledger import READ_MAX, TELL_AGAIN_S, Ledger, Ticket

from .worker import HELLO, LENGTH, FakeWorker


def ledger() -> Ledger:
    made = Ledger(silence_s=10, stall_s=30)
    made.hear(HELLO, 0.0)
    return made


def opened(book: Ledger, now: float, ring=lambda: None) -> Ticket:
    ticket = Ticket("r", ring)
    book.open(ticket, now)
    return ticket


def progress(**changed):
    made = FakeWorker("ipc://unused")._progress()
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return type(made)(**(fields | changed))


def tokens(count: int, cached: int = 0) -> Tokens:
    return Tokens(request="r", tokens=[1] * count, logprobs=[0.0] * count, cached_tokens=cached)


def endings(ticket: Ticket) -> list:
    found = []
    while (mail := ticket.take()) is not None:
        found += [mail.ended] if mail.ended is not None else []
    return found


EVENTS = {
    "ended": lambda book, ticket: book.hear(Ended(request="r", outcome=LENGTH), 1.0),
    "leaves": lambda book, ticket: book.leave(ticket, "client"),
    "lost": lambda book, ticket: book.lose("died"),
    "tokens": lambda book, ticket: book.hear(tokens(2), 1.0),
    "drain": lambda book, ticket: book.leave_all("drain"),
}


@pytest.mark.parametrize("order", list(permutations(EVENTS)))
def test_in_every_order_a_request_ends_once_and_the_table_empties(order):
    book = ledger()
    ticket = opened(book, 0.0)
    for name in order:
        EVENTS[name](book, ticket)
    first = next(name for name in order if name != "tokens")
    expected = {
        "ended": Completed("length"),
        "leaves": Cancelled("client"),
        "lost": PeerLost("died"),
        "drain": Cancelled("drain"),
    }[first]
    assert endings(ticket) == [expected]
    assert len(book) == 0


def test_one_that_left_counts_until_the_worker_says_that_it_ended():
    book = ledger()
    ticket = opened(book, 0.0)
    assert book.leave(ticket, "stop_string") and not book.leave(ticket, "client")
    assert len(book) == 1
    book.hear(Ended(request="r", outcome=Cancelled("stop_string")), 1.0)
    assert len(book) == 0 and book.unknown == 0


def test_messages_for_nobody_change_nothing_and_are_counted():
    book = ledger()
    book.hear(tokens(1), 1.0)
    book.hear(Ended(request="r", outcome=LENGTH), 1.0)
    assert (book.unknown, len(book)) == (2, 0)


def test_a_worker_that_counts_other_tokens_than_came_is_noticed():
    book = ledger()
    for said, wrong in ((5, 0), (4, 1), (None, 1), (6, 2)):
        opened(book, 0.0)
        book.hear(tokens(2), 1.0)
        book.leave_all("client")  # who leaves is counted as anybody else
        book.hear(tokens(3), 1.0)
        book.hear(Ended(request="r", outcome=LENGTH, generated=said), 1.0)
        assert book.miscounted == wrong, said


def test_the_same_id_twice_is_a_bug():
    book = ledger()
    opened(book, 0.0)
    with pytest.raises(Bug):
        opened(book, 0.0)


def test_a_slow_reader_finds_its_messages_merged_and_none_missing():
    book, rings = ledger(), []
    ticket = opened(book, 0.0, lambda: rings.append(1))
    for _ in range(300):
        book.hear(tokens(7, cached=4), 1.0)
    spec = Spec(1, 2, 3, 1)
    book.hear(Ended(request="r", outcome=LENGTH, spec=spec), 1.0)
    mails = []
    while (mail := ticket.take()) is not None:
        mails.append(mail)
        assert len(mail.tokens) <= READ_MAX and len(mail.tokens) == len(mail.logprobs)
    assert sum(len(mail.tokens) for mail in mails) == 2100
    assert [mail.ended for mail in mails] == [None] * (len(mails) - 1) + [LENGTH]
    assert {mail.cached_tokens for mail in mails} == {4} and mails[-1].spec == spec
    assert len(rings) >= 300 + len(mails) - 1


def test_silence_is_measured_from_the_last_report_and_not_from_tokens():
    book = ledger()
    opened(book, 0.0)
    book.hear(progress(running=1), 5.0)
    book.hear(tokens(1), 14.0)
    assert book.overdue(14.9) is None
    assert "silent" in str(book.overdue(15.1))
    assert book.lose("x") == ["r"] and book.overdue(99.0) is None


def test_a_worker_that_knows_of_nothing_is_overdue_only_after_a_while():
    book = ledger()
    opened(book, 0.0)
    for second in range(1, 11):
        book.hear(progress(running=0), float(second))
        assert book.overdue(float(second)) is None
    book.hear(progress(running=0), 10.5)
    assert "knew of no request" in str(book.overdue(10.5))
    book.hear(progress(running=0, waiting=1), 10.6)
    assert book.overdue(10.7) is None


def test_ready_needs_steps_only_while_something_is_in_flight():
    book = ledger()
    assert book.why_not_ready(0.0) == ["the worker has not reported progress"]
    still = progress(steps=5)
    for second in range(100):
        book.hear(still, float(second))
    assert book.why_not_ready(99.5) == []
    opened(book, 99.0)
    for second in range(100, 129):
        book.hear(still, float(second))
    assert book.why_not_ready(128.9) == []
    book.hear(still, 130.0)
    assert "no step" in book.why_not_ready(130.0)[0]
    book.hear(progress(steps=5, prefill_tokens=9), 130.1)
    assert book.why_not_ready(130.2) == []
    assert "no report" in book.why_not_ready(135.2)[0]


def test_who_should_end_is_told_again_until_it_has_ended():
    book = ledger()
    book.open(Ticket("r", lambda: None), 0.0)
    book.told(["r", "nobody"], "client", 0.0)
    assert book.leaving == 1 and book.unheard(TELL_AGAIN_S - 0.1) == []
    assert book.unheard(TELL_AGAIN_S) == [("r", "client")]
    book.told(["r"], "client", TELL_AGAIN_S)
    assert book.unheard(TELL_AGAIN_S + 0.1) == []
    assert book.unheard(2 * TELL_AGAIN_S) == [("r", "client")]
    book.hear(Ended(request="r", outcome=Cancelled("client")), 11.0)
    assert book.leaving == 0 and book.unheard(99.0) == []


def test_a_worker_that_is_lost_is_told_nothing_more():
    book = ledger()
    book.open(Ticket("r", lambda: None), 0.0)
    book.told(["r"], "client", 0.0)
    book.lose("gone")
    assert book.leaving == 0 and book.unheard(99.0) == []


def test_a_worker_moves_while_it_has_work_and_its_counters_do():
    book = ledger()
    book.hear(HELLO, 0.0)
    book.hear(progress(steps=1, running=1), 1.0)
    assert book.moving(2.0, 1.5) and not book.moving(3.0, 1.5)
    book.hear(progress(steps=1, running=1), 3.0)  # it says the same once more
    assert not book.moving(3.0, 1.5)
    book.hear(progress(steps=1, prefill_tokens=64, running=1), 3.1)
    assert book.moving(4.0, 1.5)
    book.hear(progress(steps=2, prefill_tokens=64, running=0), 4.0)
    assert not book.moving(4.1, 1.5), "nothing is asked of it"
