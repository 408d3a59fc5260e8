"""Who may be given work and how dear it is: beliefs about prefixes, pace, breakers, trust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stanchion.core import outcome
from stanchion.core.messages import Start
from stanchion.core.outcome import Outcome, fault_owner
from stanchion.core.request import Sampling
from stanchion.gateway.breaker import Breaker, Rules
from stanchion.gateway.pace import Paces
from stanchion.gateway.prefixes import NO_HIT, Hit, Prefixes, blocks_of
from stanchion.gateway.rotation import Asked, Room, Rotation, blamed
from stanchion.gateway.router import (
    FAVOUR_MIN,
    FAVOUR_SHARE,
    PERMIT_TOKENS,
    Life,
    Route,
    Router,
    Standing,
    Weight,
)
from stanchion.gateway.settings import GatewaySettings
from stanchion.gateway.trust import SUSPICION_S, Trust

from .test_router import SUSPECT_S, fleet
from .worker import HELLO

BLOCK = 64
ROOM = Room(1024 * BLOCK, 0)
A, B, C = ("both-0", 1), ("both-1", 1), ("both-2", 1)


def started(tokens: Sequence[int], tenant: str = "", salt: str = "", session: str = "") -> Start:
    sampling = Sampling(max_tokens=8)
    return Start(
        request="r", tokens=list(tokens), sampling=sampling, tenant=tenant, salt=salt,
        session=session,
    )  # fmt: skip


def prompt(blocks: int, seed: int = 0) -> list[int]:
    return list(Random(seed).randbytes(blocks * BLOCK))


# ---- prefixes -------------------------------------------------------------------------------


def test_a_hit_is_the_run_of_leading_blocks_that_were_sent_there():
    known, long = Prefixes(1000), prompt(10)
    known.sent(A, blocks_of(started(long[: 4 * BLOCK + 63]), HELLO), 100, 0)
    assert known.hit(A, blocks_of(started(long), HELLO)) == Hit(4 * BLOCK, 0)
    assert known.hit(B, blocks_of(started(long), HELLO)) == NO_HIT
    other = [*long[:BLOCK], long[BLOCK] ^ 1, *long[BLOCK + 1 :]]
    assert known.hit(A, blocks_of(started(other), HELLO)) == Hit(BLOCK, 0)
    known.forget(A)
    assert known.hit(A, blocks_of(started(long), HELLO)) == NO_HIT


@pytest.mark.parametrize("changed", [{"tenant": "b"}, {"salt": "b"}])
def test_nothing_is_found_across_tenants_and_salts(changed: dict[str, str]):
    known, long = Prefixes(1000), prompt(4)
    known.sent(A, blocks_of(started(long, "a", "a"), HELLO), 100, 0)
    assert known.hit(A, blocks_of(started(long, "a", "a"), HELLO)).device
    apart = blocks_of(started(long, **{"tenant": "a", "salt": "a"} | changed), HELLO)
    assert known.hit(A, apart) == NO_HIT


def test_short_pages_are_hashed_many_at_once():
    blocks = blocks_of(started(prompt(4)), replace_hello(page_tokens=16))
    assert (len(blocks.keys), blocks.tokens) == (4, 64)
    assert blocks_of(started(prompt(4)), replace_hello(page_tokens=48)).tokens == 96


def replace_hello(**changed: int):
    from msgspec.structs import replace as changed_struct

    return changed_struct(HELLO, **changed)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 30)), max_size=40))
def test_what_is_kept_is_bounded_and_the_longest_unused_leaves_first(steps):
    known, lives = Prefixes(60), (A, B, C)
    for who, seed, blocks in steps:
        life, asked = lives[who], blocks_of(started(prompt(blocks, seed)), HELLO)
        known.sent(life, asked, 10, 10)
        assert len(known) <= 60
        hit = known.hit(life, asked)  # the newest is there, as far as there is room
        assert hit == Hit(min(blocks, 10) * BLOCK, min(max(blocks - 10, 0), 10) * BLOCK)


def test_what_left_the_device_counts_as_in_tiers_and_costs_more():
    known = Prefixes(1000)
    first, second = (blocks_of(started(prompt(6, seed)), HELLO) for seed in (1, 2))
    known.sent(A, first, 8, 100)
    known.sent(A, second, 8, 100)
    assert known.hit(A, second) == Hit(6 * BLOCK, 0)
    assert known.hit(A, first) == Hit(2 * BLOCK, 4 * BLOCK)


# ---- a cluster, in no time ------------------------------------------------------------------


WELL = outcome.Completed("stop")


@dataclass
class Cluster:
    """Requests over the real router and rotation; a worker ends one after so many ticks, each."""

    names: Sequence[str]
    ticks: dict[str, int]
    router: Router = field(default_factory=lambda: Router(SUSPECT_S))
    rotation: Rotation = field(default_factory=lambda: Rotation(GatewaySettings()))
    now: float = 0.0
    running: dict[str, tuple[Route, int]] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)
    whys: Counter[str] = field(default_factory=Counter)
    minted: int = 0

    def standings(self) -> list[Standing]:
        return fleet(*self.names)

    def send(self, start: Start, kept: bool = True) -> Route | None:
        return self.route(self.rotation.asked(start, HELLO, kept))

    def route(self, asked: Asked) -> Route | None:
        standings = self.standings()
        barred = self.rotation.shut(standings, self.now)
        weighed = self.rotation.weighed(asked, standings, self.now)
        route = self.router.choose(weighed, (), False, barred)
        if route is None:
            return None
        self.minted += 1
        name = f"r{self.minted}"
        self.router.take(name, route)
        self.rotation.taken(name, route, asked, dict.fromkeys(route.lives, ROOM), self.now)
        self.running[name] = (route, self.ticks.get(route.worker[0], 1))
        self.given[route.worker[0]] += 1
        self.whys[route.why] += 1
        return route

    def end(self, name: str, ended: Outcome = WELL, moving: Sequence[Life] = ()) -> None:
        route, _ = self.running.pop(name)
        if isinstance(ended, outcome.Completed):
            self.router.begun(name)
            self.rotation.said(name, route, self.now)
            self.rotation.came(route.worker, 1)
        self.rotation.ended(name, route, ended, self.now, moving)
        self.router.release(name)

    def tick(self) -> None:
        self.now += 0.1
        for life in (one.life for one in self.standings()):
            self.rotation.sample(life, self.router.permits(life), self.now)
        for name, (route, left) in list(self.running.items()):
            self.running[name] = (route, left - 1)
            if left <= 1:
                self.end(name)


EIGHT = [f"both-{at}" for at in range(8)]
SHARED = prompt(512)  # 32k tokens


def spread(cluster: Cluster, concurrency: int, ticks: int) -> list[Counter[str]]:
    """So many at once, all with one prompt; who had how many in flight, at each tick."""
    held = []
    asked = cluster.rotation.asked(started(SHARED), replace_hello(page_tokens=2048), True)
    for _ in range(ticks):
        while len(cluster.running) < concurrency:
            assert cluster.route(asked) is not None
        held.append(Counter(route.worker[0] for route, _ in cluster.running.values()))
        cluster.tick()
    return held


LATE = {name: 80 if name == "both-3" else 4 for name in EIGHT}  # twenty times as slow


def even(cluster: Cluster) -> None:
    held = spread(cluster, 480, 60)
    for one in held:
        assert max(one.values()) <= 2 * 480 / 8, f"{max(one.values())} of 480 on one worker"
    first = Counter(cluster.given)
    spread(cluster, 480, 60)
    later = cluster.given - first
    others = [count for name, count in later.items() if name != "both-3"]
    assert later["both-3"] < first["both-3"], "the slow one's share did not fall"
    assert later["both-3"] * 10 < sum(others) / len(others), "the slow one's share did not fall"
    assert min(others) > 0


def test_one_prompt_for_all_and_one_slow_worker():
    """D26: nobody has more than twice the mean, and the slow one's share falls."""
    even(Cluster(EIGHT, LATE))


class CountedLate(Router):
    """The wrong variant (D26): load is counted once the response begins, so all look idle."""

    def permits(self, life: Life) -> int:
        return super().permits(life) - self.waiting(life)

    def owes(self, life: Life) -> int:
        return 0


def test_load_that_counts_late_is_caught():
    cluster = Cluster(EIGHT, LATE)
    cluster.router = CountedLate(SUSPECT_S)
    with pytest.raises(AssertionError, match="of 480 on one worker"):
        even(cluster)


def test_while_load_is_even_a_prompt_goes_where_its_beginning_is():
    cluster = Cluster(EIGHT, {})
    prompts = [prompt(20, seed) for seed in range(32)]
    homes = []
    for one in prompts:
        homes.append(cluster.send(started(one)).worker)
        cluster.tick()
    assert {*Counter(homes).values()} == {4}, "new prompts take turns"
    for turn in range(4):
        order = Random(turn).sample(range(32), 32)
        for at in order:
            longer = [*prompts[at], *prompt(1 + turn, 100 + at)]
            route = cluster.send(started(longer))
            assert (route.worker, route.why) == (homes[at], "prefix")
            cluster.tick()


def bounded(cluster: Cluster) -> None:
    """All say their first word at once, and none ends."""
    for at in range(40):
        route = cluster.send(started(SHARED))
        cluster.router.begun(f"r{at + 1}")
        assert route is not None
    most, least = max(cluster.given.values()), min(cluster.given.values())
    assert FAVOUR_MIN < most <= FAVOUR_SHARE * 20 + 1 and len(cluster.given) == 2, f"{most}"
    assert least and cluster.whys["prefix"] and cluster.whys["load"]


def test_a_favourite_has_a_bound(monkeypatch: pytest.MonkeyPatch):
    bounded(Cluster(EIGHT[:2], {}))
    monkeypatch.setattr("stanchion.gateway.router.favoured", lambda permits, every: True)
    with pytest.raises(AssertionError):
        bounded(Cluster(EIGHT[:2], {}))


def test_a_conversation_stays_where_it_was_while_nothing_better_is_known():
    cluster = Cluster(EIGHT, {})
    first = cluster.send(started(prompt(8, 1), session="s")).worker
    cluster.tick()
    cluster.rotation.prefixes.forget(first)
    for _ in range(3):
        route = cluster.send(started(prompt(8, 2), session="s"), kept=False)
        assert (route.worker, route.why) == (first, "session")
        cluster.tick()
    others = {cluster.send(started(prompt(8, 2), tenant="b", session="s")).worker}
    cluster.tick()
    assert others != {first}, "a tenant's sessions are its own"


def test_a_worker_under_suspicion_is_not_favoured():
    cluster = Cluster(EIGHT[:2], {})
    home = cluster.send(started(SHARED)).worker
    cluster.tick()
    assert cluster.send(started(SHARED)).worker == home
    cluster.tick()
    cluster.rotation.trust.suspected(home, cluster.now)
    routes = []
    for _ in range(2):
        routes.append(cluster.send(started(SHARED, salt=f"{len(routes)}")))
        cluster.tick()
    whys = {cluster.send(started(SHARED)).why, *(route.why for route in routes)}
    assert "prefix" not in whys or cluster.router.permits(home) == 0
    cluster.rotation.trust.cleared(home, cluster.now)
    assert cluster.rotation.weighed(
        cluster.rotation.asked(started(SHARED), HELLO, True), cluster.standings(), cluster.now
    )[int(home[0][-1])].weight.saved


def test_what_is_owed_counts_until_the_first_word():
    router = Router(SUSPECT_S)
    route = Route(A, owed=20 * PERMIT_TOKENS)
    router.take("long", route)
    for at in range(10):
        router.take(f"short {at}", Route(B))
    assert router.choose(fleet("both-0", "both-1")).worker == B
    assert router.begun("long") and not router.begun("long")
    assert router.choose(fleet("both-0", "both-1")).worker == A
    router.release("long")
    assert router.owes(A) == router.waiting(A) == router.permits(A) == 0


def test_requests_that_others_gave_a_worker_count_too():
    busy, idle = fleet("both-0", "both-1")
    busy = replace(busy, weight=Weight(others=3))
    assert {Router(SUSPECT_S).choose([busy, idle]).worker for _ in range(4)} == {B}


def test_a_worker_that_was_hung_is_not_slow_for_that():
    paces = Paces()
    for at in range(50):
        paces.sample(A, 4, 0, at / 10)
        paces.sample(B, 4, 40, at / 10)
    assert paces.factor(A, [A, B]) > 4 and paces.factor(B, [A, B]) == 1
    paces.forget(A)
    assert paces.factor(A, [A, B]) == 1


def test_why_a_route_was_taken_is_told():
    router = Router(SUSPECT_S)
    assert router.choose(fleet("both-0")).why == "only"
    assert router.choose(fleet("both-0", "both-1")).why == "turn"
    router.take("r", Route(A))
    assert router.choose(fleet("both-0", "both-1")).why == "load"
    assert router.choose(fleet("both-0", "both-1"), [A]).why == "again"
    saves = [replace(one, weight=Weight(900, 900, "tier")) for one in fleet("both-0")]
    others = [replace(one, weight=Weight(900)) for one in fleet("both-1")]
    router.release("r")
    assert router.choose([*saves, *others]).why == "tier"


# ---- breakers (D24) -------------------------------------------------------------------------

REST_S, PROBE_S = 5.0, 30.0
RULES = Rules(5, REST_S, 2, PROBE_S)
CAUSES: dict[str, tuple[Outcome, str | None]] = {
    "400": (outcome.Rejected("prompt", "too long"), "client"),
    "413": (outcome.Rejected("body", "too large"), "client"),
    "422": (outcome.Rejected("tools", "no schema"), "client"),
    "429": (outcome.Overloaded("queue", 1.0), "capacity"),
    "503 and Retry-After": (outcome.Overloaded("busy", 30.0), "capacity"),
    "cancel": (outcome.Cancelled("client"), "client"),
    "stop string": (outcome.Cancelled("stop_string"), "client"),
    "500": (outcome.PeerLost("500"), "worker"),
    "reset": (outcome.PeerLost("connection reset"), "worker"),
    "timeout": (outcome.Cancelled("deadline"), "worker"),
    "mid-body drop": (outcome.PeerLost("body cut"), "worker"),
    "monitor abort": (outcome.Cancelled("monitor"), "data"),
    "NaN": (outcome.OutputSuspect("NaN"), "data"),
    "drain": (outcome.Cancelled("drain"), None),
    "prefill preempted": (outcome.PeerLost("again", owner="capacity"), "capacity"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("workers", [1, 3])
def test_only_a_workers_own_faults_open_its_breaker(workers: int, cause: str):
    d24(Cluster(EIGHT[:workers], {}), cause)


def d24(cluster: Cluster, cause: str) -> None:
    """The first worker has this cause a hundred times; then it is well."""
    ended, owner = CAUSES[cause]
    assert fault_owner(ended) == owner
    sick = cluster.names[0]
    refused, opened = 0, 0
    for _ in range(100 * len(cluster.names)):
        cluster.now += 0.1
        if cluster.send(started([1])) is None:
            refused += 1
        for name, (route, _) in list(cluster.running.items()):
            cluster.end(name, ended if route.worker[0] == sick else outcome.Completed("stop"))
        opened = cluster.rotation.breakers.of((sick, 1)).opened
    counts = owner == "worker"
    assert bool(opened) is counts, f"{cause} opened it {opened} times"
    assert bool(refused) is (counts and len(cluster.names) == 1)
    for name in cluster.names[1:]:
        assert cluster.rotation.breakers.of((name, 1)).state == "closed"
    cluster.now += REST_S + 0.1  # well again: the first probe that ends well is enough
    for _ in range(50):
        cluster.send(started([1]))
        for name in list(cluster.running):
            cluster.end(name)
        if cluster.rotation.breakers.of((sick, 1)).state == "closed":
            break
    assert cluster.rotation.breakers.of((sick, 1)).state == "closed"
    assert cluster.given[sick]


@pytest.mark.parametrize("cause", ["400", "429", "monitor abort"])
def test_a_breaker_that_counts_every_failure_is_caught(cause: str, monkeypatch: pytest.MonkeyPatch):
    """The wrong variant (D24): whatever is no success counts."""
    cluster = Cluster(EIGHT[:3], {})
    monkeypatch.setattr(
        "stanchion.gateway.rotation.fault_owner",
        lambda ended: None if isinstance(ended, outcome.Completed) else "worker",
    )
    with pytest.raises(AssertionError, match="opened it"):
        d24(cluster, cause)


def opened_at(now: float) -> Breaker:
    breaker = Breaker(RULES)
    for at in range(5):
        breaker.taken(f"f{at}", now)
        breaker.ended(f"f{at}", False, "worker", now)
    assert breaker.state == "open" and not breaker.admits(now + REST_S - 0.1)
    return breaker


def test_half_open_lets_exactly_so_many_through():
    breaker = opened_at(0.0)
    through = 0
    for at in range(100):
        if breaker.admits(REST_S):
            breaker.taken(f"p{at}", REST_S)
            through += 1
    assert through == RULES.probes
    breaker.ended("p0", False, "client", REST_S)  # it says nothing, and makes room for another
    assert breaker.admits(REST_S)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "well", "fault", "client", "capacity", "say"]),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.5, 3.0]),
        ),
        max_size=60,
    )
)
def test_half_open_is_always_left(steps):
    breaker, now, open_, minted = opened_at(0.0), REST_S, [], 0
    for what, which, passed in steps:
        now += passed
        if what == "take":
            if breaker.admits(now):
                minted += 1
                breaker.taken(f"p{minted}", now)
                open_.append(f"p{minted}")
        elif open_ and what == "say":
            breaker.said(open_[which % len(open_)], now)
        elif open_:
            owner = None if what == "well" else "worker" if what == "fault" else what
            breaker.ended(open_.pop(which % len(open_)), what == "well", owner, now)
    breaker.admits(now)
    if breaker.state == "half_open":
        assert breaker.admits(now + PROBE_S) or breaker.state == "open"
        assert breaker.admits(now + 2 * PROBE_S + REST_S)


def test_a_probe_that_never_ends_is_judged_by_whether_it_speaks():
    for says, after_s, state in (
        (True, RULES.proof_s - 0.1, "half_open"),
        (True, RULES.proof_s, "closed"),
        (False, PROBE_S - 0.1, "half_open"),
        (False, PROBE_S, "open"),
    ):
        breaker = opened_at(0.0)
        assert breaker.admits(REST_S)
        breaker.taken("p", REST_S)
        if says:
            breaker.said("p", REST_S)
        breaker.tick(REST_S + after_s)
        assert breaker.state == state


def test_endings_of_requests_from_before_it_opened_say_nothing():
    breaker = Breaker(RULES)
    for at in range(8):
        breaker.taken(f"f{at}", 0.0)
    for at in range(5):
        breaker.ended(f"f{at}", False, "worker", 0.0)
    assert breaker.admits(REST_S)
    breaker.taken("p", REST_S)
    breaker.ended("f5", False, "worker", REST_S)
    breaker.ended("f6", True, None, REST_S)
    assert breaker.state == "half_open"
    breaker.ended("p", True, None, REST_S)
    assert breaker.state == "closed"


def test_few_faults_among_many_that_end_well_open_nothing():
    breaker = Breaker(RULES)
    for at in range(200):
        breaker.ended(f"{at}", at % 3 > 0, "worker" if at % 3 == 0 else None, at / 10)
    assert breaker.state == "closed"


@pytest.mark.parametrize("moves", [True, False])
def test_a_rush_shuts_out_nobody_who_gets_on_with_it(moves: bool):
    """Deadlines that pass in a queue are its length; those of a worker that stands still are its
    own. The wrong variant, for which all are the worker's, is the second case."""
    cluster = Cluster(["decode-0", "prefill-0"], {})
    for _ in range(20):
        cluster.now += 0.1
        if cluster.send(started([1])) is None:
            break
        for name in list(cluster.running):
            cluster.end(name, outcome.Cancelled("deadline"), [("prefill-0", 1)] if moves else [])
    breakers, owners = cluster.rotation.breakers, cluster.rotation.owners
    assert (breakers.of(("prefill-0", 1)).state == "open") is not moves
    assert breakers.of(("decode-0", 1)).state == "closed"
    assert set(owners) == {"capacity" if moves else "worker"}


def test_of_a_pair_the_one_at_fault_is_blamed():
    pair = Route(("decode-0", 1), ("prefill-1", 2))
    assert blamed(outcome.PeerLost("x", "prefill-1"), pair) == ("prefill-1", 2)
    assert blamed(outcome.Cancelled("deadline"), pair) == ("prefill-1", 2)
    assert blamed(outcome.PeerLost("x"), pair) == ("decode-0", 1)
    assert blamed(outcome.PeerLost("x", "prefill-9"), pair) == ("decode-0", 1)


def test_a_worker_that_asked_for_rest_gets_less_and_not_nothing():
    cluster = Cluster(EIGHT[:2], {})
    cluster.send(started([1]))
    (name,) = cluster.running
    tired = cluster.running[name][0].worker
    cluster.end(name, outcome.Overloaded("busy", 2.0))
    cluster.ticks = dict.fromkeys(EIGHT, 10**6)
    for _ in range(18):
        cluster.send(started([1]))
    held = cluster.router.permits(tired)
    assert 1 <= held <= 3
    cluster.now += 2.1
    for _ in range(18):
        cluster.send(started([1]))
    assert cluster.router.permits(tired) == 18


# ---- trust ----------------------------------------------------------------------------------


def test_so_many_confirmed_answers_within_the_window_take_a_worker_out():
    trust = Trust(3, 600.0)
    assert [trust.confirmed(A, at) for at in (0.0, 700.0, 1000.0)] == [False] * 3
    assert not trust.out(A) and trust.suspicious(A, 1000.0)
    assert trust.confirmed(A, 1299.0) and trust.out(A) and not trust.out(("both-0", 2))
    assert not trust.confirmed(A, 1299.0), "it is told once"
    trust.let_back(A)
    assert not trust.out(A)
    never = Trust(0, 600.0)
    assert not any(never.confirmed(A, 0.0) for _ in range(100))


def test_a_suspicion_passes_and_what_was_confirmed_stays():
    trust = Trust(3, 600.0)
    trust.suspected(A, 0.0)
    assert trust.suspicious(A, SUSPICION_S - 1) and not trust.suspicious(A, SUSPICION_S + 1)
    trust.suspected(A, 100.0)
    trust.cleared(A, 101.0)
    assert not trust.suspicious(A, 101.0)
    trust.confirmed(A, 102.0)
    trust.cleared(A, 103.0)
    assert trust.suspicious(A, 103.0) and not trust.suspicious(A, 703.0)
