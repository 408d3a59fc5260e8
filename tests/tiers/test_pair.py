"""Tiers and handoffs together: a lifted prefix is sent on while its load is still under way."""

from __future__ import annotations

import msgspec
import pytest

from stanchion.core.messages import Start
from stanchion.core.outcome import PeerLost
from stanchion.device.stream import Queue
from stanchion.disagg.check import Mode
from stanchion.engine.scheduler import Limits
from stanchion.engine.tierplan import TierPlan
from stanchion.kv.transfer.book import Book
from stanchion.sim.choices import seeded
from tests.disagg.rig import GREEDY, Cluster, Settings, differs
from tests.disagg.test_storms import storm
from tests.tiers.rig import Queues, prompt, tiers_of

PAGE = 16


def pair(seed: int, check: Mode = "off", host: int = 400, chunk: int = 64) -> Cluster:
    queues = Queues(seeded(seed))
    return Cluster.of(
        Settings(
            Limits(chunk_tokens=chunk, running_max=8),
            pages=40,
            check=check,
            poison=True,
            tiers=TierPlan(host, check=check, queue=queues),
            turn=queues.turn,
        )
    )


def ask(cluster: Cluster, name: str, tokens: list[int]) -> Start:
    start = Start(
        request=name,
        tokens=tokens,
        sampling=msgspec.structs.replace(GREEDY, max_tokens=6),
        prefill=cluster.partner(0),
    )
    cluster.step([start])
    return start


def flush_decode(cluster: Cluster) -> None:
    """So that all of the prefix has to be sent."""
    engine = cluster.decodes[0].engine
    engine.tree.flush()
    tiers_of(engine).flush()


def lifted_prefix_is_sent_right(seed: int) -> bool:
    """A prefix that prefill has in its host alone; decode has nothing of it."""
    cluster = pair(seed)
    shared = prompt(1, 200)
    ask(cluster, "first", shared)
    cluster.settle()
    for at in range(3):
        ask(cluster, f"filler {at}", prompt(100 + at, 400))
        cluster.settle()
    flush_decode(cluster)
    again = ask(cluster, "again", shared + prompt(2, 30))
    cluster.settle()
    assert tiers_of(cluster.prefills[0].engine).counters.lifted == 200 // PAGE
    assert cluster.audit() == []
    return differs(again, cluster.heard["again"], cluster.settings) is None


def test_a_lifted_prefix_is_sent_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(lifted_prefix_is_sent_right(seed) for seed in range(6))

    def never(self: Book[object], other: Queue, mark: int) -> None:
        """The old way: the early send of a cached prefix does not look at its load."""

    monkeypatch.setattr(Book, "wait", never)
    assert not all(lifted_prefix_is_sent_right(seed) for seed in range(6))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("check", ["off", "full"])
def test_a_pair_with_tiers_on_both_sides(seed: int, check: Mode) -> None:
    cluster = pair(seed, check, host=30)
    starts = storm(cluster, seeded(seed), 60, trouble=1 << 30)
    cluster.settle()
    wrong = [differs(one, cluster.heard[name], cluster.settings) for name, one in starts.items()]
    assert [one for one in wrong if one] == [], f"seed {seed}"
    assert cluster.audit() == [], f"seed {seed}"


def test_a_bad_page_of_prefills_host_costs_a_retry_and_no_answer() -> None:
    cluster = pair(1, "full", chunk=32)
    shared = prompt(1, 200)
    ask(cluster, "first", shared)
    cluster.settle()
    for at in range(3):
        ask(cluster, f"filler {at}", prompt(100 + at, 400))
        cluster.settle()
    flush_decode(cluster)
    tiers = tiers_of(cluster.prefills[0].engine)
    slots = [one.slot for one in tiers.host._kept.values()]
    memory = tiers.copier._host  # type: ignore[attr-defined]
    for slot in slots:
        memory[slot * tiers.copier.slots.page_bytes + 40] ^= 1  # type: ignore[attr-defined]
    again = ask(cluster, "again", shared + prompt(2, 30))
    cluster.settle()
    assert tiers.counters.bad_host
    assert isinstance(cluster.outcome("again"), PeerLost), "which its gateway tries elsewhere"
    assert not cluster.heard["again"].tokens
    retried = ask(cluster, "retried", again.tokens)
    cluster.settle()
    assert differs(retried, cluster.heard["retried"], cluster.settings) is None
    assert cluster.audit() == []
