import numpy as np
import pytest

from stanchion.core.errors import Bug, Overloaded
from stanchion.kv.pages import PagePool


def test_a_page_waits_for_its_last_user() -> None:
    pool = PagePool(5)
    request = pool.take(4, "request 1")
    flight = request.share("flight 9")
    request.drop()  # the client left
    assert pool.available == 0
    assert pool.holders(int(flight.pages[0])) == ["flight 9"]
    flight.drop()  # the batch landed
    assert pool.available == 4
    assert pool.audit() == []


def test_a_pin_of_its_own_keeps_part_of_a_run() -> None:
    pool = PagePool(5)
    request = pool.take(4, "request 1")
    kept = pool.regrip(request.pages[:1], "prefix")
    request.drop()
    assert pool.available == 3
    assert pool.holders(int(kept.pages[0])) == ["prefix"]
    assert pool.audit() == []


def test_who_shares_a_run_shares_its_growth() -> None:
    pool = PagePool(5)
    request = pool.take(1, "request 1")
    flight = request.share("flight 1")
    fresh = pool.grow(request, 2)
    request.drop()
    assert list(flight.pages[1:]) == list(fresh)
    assert pool.available == 1
    flight.drop()
    assert pool.available == 4


def test_a_pin_drops_once() -> None:
    pin = PagePool(2).take(1, "request 1")
    pin.drop()
    with pytest.raises(Bug, match="request 1 dropped its pages twice"):
        pin.drop()
    with pytest.raises(Bug, match="share pages that it dropped"):
        pin.share("flight 2")


def test_nobody_pins_a_free_page() -> None:
    pool = PagePool(3)
    with pytest.raises(Bug, match="nobody holds"):
        pool.regrip(np.array([1], np.int32), "prefix")


def test_asking_for_too_much_changes_nothing() -> None:
    pool = PagePool(3)
    with pytest.raises(Overloaded):
        pool.take(3, "request 1")
    assert pool.available == 2


def test_each_taking_is_a_new_generation_and_pages_rest_before_reuse() -> None:
    pool = PagePool(4)
    first = pool.take(1, "a")
    page = int(first.pages[0])
    generation = int(pool.generations[page])
    first.drop()
    assert page not in pool.take(2, "b").pages  # first in, first out
    again = pool.take(1, "c")
    assert int(again.pages[0]) == page
    assert int(pool.generations[page]) == generation + 1


def test_nobody_gets_the_null_page() -> None:
    assert 0 not in PagePool(8).take(7, "all").pages


def test_the_audit_sees_a_lost_page_and_a_double_one() -> None:
    pool = PagePool(4)
    pin = pool.take(1, "a")
    pool._free.append(int(pin.pages[0]))
    assert any("free and held" in line for line in pool.audit())
    pool._free.pop()
    pool._free.pop()
    assert any("is lost" in line for line in pool.audit())
