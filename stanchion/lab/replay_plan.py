"""What a replay sends, and when: a schedule made of recorded requests. Pure.

Two loops. *Open*: each request is due at its recorded time, whatever the server does; this keeps
the load. *Session*: a session's next request is due when its predecessors have ended, after the
client's own pause; this keeps what depends on what. In both, a request's time is worked out here,
beforehand or from ends alone, never from when the sender found time for it.

The clock of a trace can be warped: idle gaps are cut to `gap_max_s` of the trace's time first, and
then all of it runs at `stages`' speeds, one after the other. So a gap of an hour, cut to 60 s, is
6 s at speed 10. How long a client waited before it left is its own patience, and is not warped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate, pairwise

from msgspec import structs

from stanchion.core.errors import ConfigError
from stanchion.core.recording import ClientAbort, Recorded, Times
from stanchion.lab.results import Loop

SPEED_MAX = 1e6
COPIES_MAX = 10_000
STAGES_MAX = 1000


@dataclass(frozen=True)
class Stage:
    """`seconds` of the replay's time at this speed; None: to the end."""

    speed: float
    seconds: float | None = None


@dataclass(frozen=True)
class Pace:
    """Trace time to replay time. Increasing, 0 at 0."""

    stages: tuple[Stage, ...]
    gap_max_s: float | None = None
    _ends: tuple[float, ...] = field(init=False)  # of stages, in the replay's time
    _reached: tuple[float, ...] = field(init=False)  # and in the trace's

    def __post_init__(self) -> None:
        if not 0 < len(self.stages) <= STAGES_MAX:
            raise ConfigError(f"speed has {len(self.stages)} stages; from 1 to {STAGES_MAX}")
        for at, one in enumerate(self.stages):
            last = at == len(self.stages) - 1
            if not 0 < one.speed <= SPEED_MAX:
                raise ConfigError(
                    f"speed is {one.speed}; it must be over 0 and at most {SPEED_MAX}"
                )
            if last != (one.seconds is None) or (one.seconds is not None and one.seconds <= 0):
                raise ConfigError("speed: all stages but the last have seconds, over 0")
        if self.gap_max_s is not None and self.gap_max_s <= 0:
            raise ConfigError(f"gap-max is {self.gap_max_s}; it must be over 0")
        seconds = [one.seconds or 0.0 for one in self.stages[:-1]]
        reached = accumulate(one.speed * (one.seconds or 0.0) for one in self.stages[:-1])
        object.__setattr__(self, "_ends", (0.0, *accumulate(seconds)))
        object.__setattr__(self, "_reached", (0.0, *reached))

    def at(self, trace_s: float) -> float:
        """When, in the replay's time, this moment of the trace has come. Gaps are cut before."""
        stage = bisect_right(self._reached, trace_s) - 1
        stage = max(stage, 0)
        return self._ends[stage] + (trace_s - self._reached[stage]) / self.stages[stage].speed

    def speed_at(self, replay_s: float) -> float:
        return self.stages[max(bisect_right(self._ends, replay_s) - 1, 0)].speed

    def pause(self, trace_s: float, from_s: float) -> float:
        """A pause that begins at `from_s` of the replay's time, cut and warped."""
        cut = trace_s if self.gap_max_s is None else min(trace_s, self.gap_max_s)
        stage = max(bisect_right(self._ends, from_s) - 1, 0)
        begun = self._reached[stage] + (from_s - self._ends[stage]) * self.stages[stage].speed
        return self.at(begun + max(cut, 0.0)) - from_s

    def words(self) -> str:
        return ",".join(
            f"{one.speed:g}" if one.seconds is None else f"{one.speed:g}x{one.seconds:g}"
            for one in self.stages
        )


def pace(said: str, gap_max_s: float | None = None) -> Pace:
    """Of "2", or of "1x60,2x60,4": speed 1 for 60 s, 2 for 60 s, then 4. Raise ConfigError."""
    stages = []
    for part in said.split(","):
        speed, _, seconds = part.strip().partition("x")
        try:
            stages.append(Stage(float(speed), float(seconds) if seconds else None))
        except ValueError:
            raise ConfigError(
                f"speed is {said!r}; it must be a number, or stages such as 1x60,2x60,4"
            ) from None
    return Pace(tuple(stages), gap_max_s)


@dataclass(frozen=True)
class Step:
    """One request to send. It is due at `at_s` where `after` is empty, otherwise `gap_s` of the
    trace's time after the last of those steps has ended. `salt` is "" in the first copy."""

    number: int
    recorded: Recorded
    copy: int
    salt: str
    at_s: float
    after: tuple[int, ...] = ()
    gap_s: float = 0.0
    abort: ClientAbort | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.recorded.request, self.copy


@dataclass(frozen=True)
class Plan:
    loop: Loop
    pace: Pace
    steps: tuple[Step, ...]

    def due(self, step: Step, ended: dict[int, float]) -> float:
        """In the replay's time; all of `step.after` must be in `ended`."""
        if not step.after:
            return step.at_s
        last = max(ended[one] for one in step.after)
        return last + self.pace.pause(step.gap_s, last)


def plan(
    requests: Sequence[Recorded],
    loop: Loop,
    pace: Pace,
    copies: int = 1,
    seed: int = 0,
    aborts: bool = True,
) -> Plan:
    """Steps in the order in which they are first due. Copies are interleaved evenly: copy k of n
    is k / n of a mean gap later, so n copies are n times the load and no bursts. Gaps are those
    between requests that have a time of their own, which in a loop by session begin one; where
    there is one alone, it lasts as long as the trace.
    """
    if not 1 <= copies <= COPIES_MAX:
        raise ConfigError(f"copies is {copies}; it must be from 1 to {COPIES_MAX}")
    ordered = sorted(requests, key=lambda one: (one.times.arrival, one.request))
    if not ordered:
        raise ConfigError("the trace has no requests")
    cut = _cut([one.times.arrival for one in ordered], pace.gap_max_s)
    before = _predecessors(ordered) if loop == "session" else [_Before()] * len(ordered)
    timed = [at for at, one in zip(cut, before) if not one.after]
    mean_gap = (timed[-1] - timed[0]) / (len(timed) - 1) if len(timed) > 1 else cut[-1]
    steps = []
    for copy in range(copies):
        later = mean_gap * copy / copies
        for at, one in enumerate(ordered):
            first = copy * len(ordered)
            steps.append(
                Step(
                    number=first + at,
                    recorded=one,
                    copy=copy,
                    salt=_salt(seed, copy),
                    at_s=pace.at(cut[at] + later),
                    after=tuple(first + earlier for earlier in before[at].after),
                    gap_s=before[at].gap_s,
                    abort=one.aborted if aborts else None,
                )
            )
    return Plan(loop, pace, tuple(steps))


def _cut(arrivals: Sequence[float], gap_max_s: float | None) -> list[float]:
    """Times from the first arrival, with idle gaps cut."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    if gap_max_s is not None:
        gaps = [min(one, gap_max_s) for one in gaps]
    return [0.0, *accumulate(gaps)]


def _salt(seed: int, copy: int) -> str:
    """Distinct for each copy and seed, so that copies share no cache with each other."""
    if copy == 0:
        return ""
    return blake2b(f"{seed} {copy}".encode(), digest_size=8).hexdigest()


def share(plan: Plan, number: int, of: int) -> Plan:
    """The steps of one of several processes. A session goes with all of its sub-agents, so nobody
    waits for what another process sends. Numbers of steps stay."""
    parents = {
        step.recorded.session: step.recorded.parent
        for step in plan.steps
        if step.recorded.parent is not None
    }
    kept = [step for step in plan.steps if _holder(step, parents, of) == number]
    return Plan(plan.loop, plan.pace, tuple(kept))


def _holder(step: Step, parents: dict[str, str], of: int) -> int:
    root = _root(step.recorded.session, parents)
    name = blake2b(f"{step.copy} {root}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") % of


def _root(session: str, parents: dict[str, str]) -> str:
    seen = set[str]()
    while session in parents and session not in seen:
        seen.add(session)
        session = parents[session]
    return session


def spread(requests: Sequence[Recorded], seconds: float) -> list[Recorded]:
    """Sessions begin evenly over so many seconds more, in their order, with their sub-agents. For
    traces that know times within a session alone, where all of them would begin at once."""
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(f"spread is {seconds}; it must be 0 or more seconds")
    parents = {one.session: one.parent for one in requests if one.parent is not None}
    ordered = sorted(requests, key=lambda one: (one.times.arrival, one.request))
    roots = list(dict.fromkeys(_root(one.session, parents) for one in ordered))
    later = {root: seconds * at / len(roots) for at, root in enumerate(roots)}
    return [
        structs.replace(one, times=_moved(one.times, later[_root(one.session, parents)]))
        for one in ordered
    ]


def _moved(times: Times, by: float) -> Times:
    known = {name: getattr(times, name) for name in times.__struct_fields__}
    return Times(**{name: at + by for name, at in known.items() if at is not None})


def cut_out(requests: Sequence[Recorded], number: int, of: int) -> list[Recorded]:
    """One of so many parts of a trace: sessions that began one after the other, whole, so a part is
    as busy as the trace was then. Parts have about equally many requests."""
    if not 0 <= number < of:
        raise ConfigError(f"part {number} of {of}: there is no such part")
    roots: dict[str, list[Recorded]] = {}
    parents = {one.session: one.parent for one in requests if one.parent is not None}
    for one in sorted(requests, key=lambda one: (one.times.arrival, one.request)):
        roots.setdefault(_root(one.session, parents), []).append(one)
    taken, part = 0, list[Recorded]()
    for members in roots.values():
        if taken * of // len(requests) == number:
            part += members
        taken += len(members)
    return part


def resumed(
    plan: Plan, done: frozenset[tuple[str, int]], base_s: float
) -> tuple[Plan, dict[int, float]]:
    """What is left of a plan, beginning at `base_s`; and the steps that are done, as if they had
    ended then, so that the pauses after them begin anew."""
    left = [step for step in plan.steps if step.key not in done]
    roots = [step.at_s for step in left if not step.after]
    begun = min(roots, default=0.0) if done else 0.0
    moved = [replace(step, at_s=base_s + max(step.at_s - begun, 0.0)) for step in left]
    ended = {step.number: base_s for step in plan.steps if step.key in done}
    return Plan(plan.loop, plan.pace, tuple(moved)), ended


def one_by_one(requests: Sequence[Recorded], times: int, seed: int) -> Plan:
    """Each of these so many times, never two at once, each time with a salt of its own. `copy`
    counts the times."""
    if not 1 <= times <= COPIES_MAX:
        raise ConfigError(f"times is {times}; it must be from 1 to {COPIES_MAX}")
    steps = [
        Step(
            number=number,
            recorded=requests[number // times],
            copy=number % times,
            salt=_salt(seed, number + 1),
            at_s=0.0,
            after=(number - 1,) if number else (),
        )
        for number in range(len(requests) * times)
    ]
    return Plan("session", pace("1"), tuple(steps))


# ---- who waits for whom ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Before:
    after: tuple[int, ...] = ()
    gap_s: float = 0.0


def _predecessors(ordered: Sequence[Recorded]) -> list[_Before]:
    """For each request, whose end it waits for: the previous one of its own chain (session and
    agent), and the sub-agents' that began since then and had ended when it arrived. A sub-agent
    waits for what its parent had ended when it began. The pause is from the last of those ends.
    """
    chains: dict[tuple[str, str | None], list[int]] = {}
    for at, one in enumerate(ordered):
        chains.setdefault((one.session, one.agent), []).append(at)
    children: dict[str, list[list[int]]] = {}
    for places in chains.values():
        if (parent := _parent(ordered[places[0]])) is not None:
            children.setdefault(parent, []).append(places)
    found = [_Before()] * len(ordered)
    for places in chains.values():
        first = ordered[places[0]]
        for earlier, at in zip([None, *places], places):
            if earlier is not None:
                after = [earlier, *_finished(ordered, children, earlier, at)]
            else:
                after = _parents(ordered, chains, first)
            found[at] = _Before(tuple(after), _gap(ordered, after, at)) if after else _Before()
    return found


def _parent(one: Recorded) -> str | None:
    """The session that a chain belongs to as a sub-agent's."""
    return one.parent if one.parent is not None else one.session if one.agent else None


def _parents(
    ordered: Sequence[Recorded], chains: dict[tuple[str, str | None], list[int]], first: Recorded
) -> list[int]:
    parent = _parent(first)
    if parent is None:
        return []
    own = [
        at
        for (session, agent), places in chains.items()
        if session == parent and (agent is None or session != first.session)
        for at in places
        if _end(ordered[at]) <= first.times.arrival
    ]
    return [max(own, key=lambda at: (_end(ordered[at]), at))] if own else []


def _finished(
    ordered: Sequence[Recorded],
    children: dict[str, list[list[int]]],
    earlier: int,
    at: int,
) -> list[int]:
    """Last requests of sub-agents that ran between two requests of their parent."""
    if ordered[at].agent is not None:
        return []
    since, until = ordered[earlier].times.arrival, ordered[at].times.arrival
    return [
        places[-1]
        for places in children.get(ordered[at].session, ())
        if places[0] != at
        and since <= ordered[places[0]].times.arrival
        and _end(ordered[places[-1]]) <= until
    ]


def _end(one: Recorded) -> float:
    """When it ended, as far as is known: a trace without ends counts it as over at once."""
    return one.times.arrival if one.times.end is None else one.times.end


def _gap(ordered: Sequence[Recorded], after: Sequence[int], at: int) -> float:
    """What the client waited: from the last end to this arrival. A trace that has no ends may say
    it itself (one that has both rounds it, so ends come first); but nobody waited longer than from
    one arrival to the next."""
    one = ordered[at]
    apart = one.times.arrival - max(_end(ordered[earlier]) for earlier in after)
    unknown = all(ordered[earlier].times.end is None for earlier in after)
    if unknown and one.think_s is not None:
        apart = min(one.think_s, apart)
    return max(apart, 0.0)
