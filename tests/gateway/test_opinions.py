"""A witness may be the sick one: a third worker, if there is one, is asked before any is blamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stanchion.core.messages import PromptScores, Start
from stanchion.core.outcome import PeerLost
from stanchion.gateway.answer import Answer, _Asked
from stanchion.gateway.ledger import Ticket
from stanchion.gateway.monitor.guard import Witness
from stanchion.gateway.monitor.witness import Clean, Confirmed
from stanchion.gateway.router import Life

from .conftest import Gateway, Workers, cluster
from .liar import TEXT, scored, witnessing
from .test_integrity import FRESH, HONEST, attempts, lies, streamed, witnesses
from .test_metrics import values
from .worker import Plan, end

PREFIX = "stanchion:"


@contextmanager
def three(folder: Path, **settings: Any) -> Iterator[tuple[Gateway, Workers]]:
    wanted = {"integrity": "strict", "retries_spare": 1000} | settings
    with cluster(folder, "both-0", "both-1", "both-2", **wanted) as made:
        made[0].until_ready()
        yield made


def wrongly(start: Start) -> Plan:
    """As a worker with damaged weights computes scores."""
    said, ended = scored(start)
    assert isinstance(said, PromptScores)
    return [replace(said, logprobs=[one - 0.7 for one in said.logprobs]), ended]


def sick(workers: Workers) -> list[str]:
    """The first worker that is asked as a witness says wrong scores from then on; its own answers
    are right. Its name, once there is one."""
    found: list[str] = []
    lies(workers, HONEST)

    def plan_of(name: str) -> Callable[[Start], Plan]:
        def plan(start: Start) -> Plan:
            if not witnessing(start):
                return HONEST(start)
            if not found:
                found.append(name)
            return wrongly(start) if found == [name] else scored(start)

        return plan

    for name, worker in workers.items():
        worker.plan = plan_of(name)
    return found


def test_a_sick_witness_costs_nobody_an_answer(tmp_path: Path) -> None:
    """Its own answers are what is confirmed: those are made again. Nobody else's is."""
    with three(tmp_path) as (gateway, workers):
        found = sick(workers)
        for _ in range(12):
            for worker in workers.values():
                worker.starts.clear()
            assert streamed(gateway.client)[0::2] == (TEXT, True)
            author = [name for name in workers if not all(map(witnessing, workers[name].starts))]
            asked = [name for name in workers if any(map(witnessing, workers[name].starts))]
            assert len(attempts(workers)) == 1 and not {*author} & {*asked}
            assert len(witnesses(workers)) == len(asked) == (2 if found[0] in asked else 1)
        seen = values(gateway.client)
        assert seen[f"{PREFIX}witness_verdicts_total|clean"] == 12
        assert seen[f"{PREFIX}witness_verdicts_total|confirmed"] == 0
        assert 1 <= seen[f"{PREFIX}witnesses_overruled_total"] <= 3, "then it is out of rotation"
        assert seen[f"{PREFIX}worker_up|both|{found[0]}"] == 1


def test_one_that_is_overruled_goes_out_of_rotation_as_one_that_was_wrong_does(
    tmp_path: Path,
) -> None:
    with three(tmp_path, confirmed_max=1) as (gateway, workers):
        found = sick(workers)
        for _ in range(8):
            assert streamed(gateway.client)[0::2] == (TEXT, True)
        seen = values(gateway.client)
        out = {name: seen[f"{PREFIX}worker_out_of_rotation|both|{name}"] for name in workers}
        assert out == {name: float(name == found[0]) for name in workers}
        assert seen[f"{PREFIX}witnesses_overruled_total"] == 1


def test_where_one_witness_is_believed_the_sick_one_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant: the first verdict stands, and those who are well are blamed for it."""
    monkeypatch.setattr(Answer, "_another", lambda self, asked, said: False)
    with three(tmp_path) as (gateway, workers):
        sick(workers)
        streamed(gateway.client)
        assert values(gateway.client)[f"{PREFIX}witness_verdicts_total|confirmed"] >= 1


def test_two_that_agree_confirm(tmp_path: Path) -> None:
    with three(tmp_path) as (gateway, workers):
        lies(workers, FRESH)
        assert streamed(gateway.client)[0::2] == (TEXT, True)
        assert (len(attempts(workers)), len(witnesses(workers))) == (2, 3)
        seen = values(gateway.client)
        assert seen[f"{PREFIX}witness_verdicts_total|confirmed"] == 1
        assert seen[f"{PREFIX}witnesses_overruled_total"] == 0


def test_a_second_that_cannot_say_changes_nothing(tmp_path: Path) -> None:
    """The first stands: what could not be looked at twice is not taken for clean."""
    asked: list[str] = []

    def plan(start: Start) -> Plan:
        if not witnessing(start):
            return FRESH(start) if not asked else HONEST(start)
        asked.append(start.request)
        return [end(start, PeerLost("gone"))] if len(asked) == 2 else scored(start)

    with three(tmp_path) as (gateway, workers):
        for worker in workers.values():
            worker.plan = plan
        assert streamed(gateway.client)[0::2] == (TEXT, True)
        assert values(gateway.client)[f"{PREFIX}witness_verdicts_total|confirmed"] == 1


def test_the_budget_is_spent_on_both(tmp_path: Path) -> None:
    """Without tokens for a second one the first stands: the answer is made again."""
    with three(tmp_path, witness_tokens_max=150) as (gateway, workers):
        lies(workers, FRESH)
        _, said, done = streamed(gateway.client)
        assert not done and "could not be witnessed" in said[-1]["error"]["message"]
        assert values(gateway.client)[f"{PREFIX}witness_verdicts_total|confirmed"] == 1
        assert len(witnesses(workers)) == 1


@pytest.mark.parametrize("part", [("both-0", 1), ("both-1", 1)])
def test_one_that_has_a_part_in_it_settles_nothing(part: Life) -> None:
    """Where the third worker is lost, its scores are computed again by whoever is left."""
    answer, books = Answer.__new__(Answer), Books()
    answer._books = books  # type: ignore[assignment]
    said = Confirmed(4, "0.7 nats apart")
    for third, settled in ((part, said), (("both-2", 1), Clean())):
        asked = _Asked(Witness(9, None), (("both-0", 1),), before=(said, (("both-1", 1),)))
        asked.ticket = Ticket("second", lambda: None)
        asked.ticket.lives = (third,)
        assert answer._settled(asked, Clean()) == settled
    assert books.told == [(("both-1", 1),)]


class Books:
    def __init__(self) -> None:
        self.told: list[tuple[Life, ...]] = []

    def overruled(self, answer: Answer, lives: tuple[Life, ...]) -> None:
        self.told.append(lives)
