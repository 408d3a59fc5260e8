"""Ablation: which difference between servers makes wrong answers? Plan, order and judgement. Pure.

Sample sizes are fixed before the first request is sent, and results are looked at once, when all of
them are in: whoever looks after each block and stops when the difference is "significant" finds
differences that are not there. Arms take turns in blocks, in an order drawn from one seed, so what
changes with time (a warm machine, a noisy neighbour) meets them all alike. Every arm replays the
same sessions, so the test that counts swaps whole sessions between arms.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from stanchion.core.errors import ConfigError
from stanchion.lab.stats import LEVEL, PER, POWER, Interval, Rate, fisher, holm, trials_needed
from stanchion.lab.stats_sessions import (
    Corrected,
    Sessions,
    bootstrap,
    corrected,
    design_effect,
    permutation,
)

ARMS_MAX = 32
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Counts = tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1)]]  # events, trials
Name = Annotated[str, Meta(min_length=1, max_length=80)]


class Arm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`serve`: flags of `stanchion serve`. `replay`: settings of the replay, over the plan's."""

    serve: str
    replay: dict[str, Any] = {}


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`requests` of each arm. `expect`: two rates that are to be told apart, such as [0.01, 0].
    `event`: "truth" (another answer than the reference's), or the name of a detector, whose own
    errors `true_positives` and `false_positives` tell: [found, of so many]."""

    trace: str
    requests: Annotated[int, Meta(ge=1)]
    block: Annotated[int, Meta(ge=1)]
    seed: int = 0
    baseline: Name
    expect: tuple[Share, Share]
    power: Annotated[float, Meta(gt=0.0, lt=1.0)] = POWER
    underpowered: bool = False
    event: Name = "truth"
    true_positives: Counts | None = None
    false_positives: Counts | None = None
    reference: Arm | None = None
    replay: dict[str, Any] = {}
    arms: Annotated[dict[Name, Arm], Meta(min_length=2, max_length=ARMS_MAX)]

    @property
    def blocks(self) -> int:
        return ceil(self.requests / self.block)


def read(text: str, name: str) -> Plan:
    """Raise ConfigError that names the file and the field."""
    try:
        plan = msgspec.convert(tomllib.loads(text), Plan)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    if plan.baseline not in plan.arms:
        known = ", ".join(plan.arms)
        raise ConfigError(f"{name}: baseline is {plan.baseline!r}; the arms are {known}")
    if plan.event == "truth" and plan.reference is None:
        raise ConfigError(f"{name}: event is truth, so it wants a [reference] whose answers are")
    if (plan.true_positives is None) != (plan.false_positives is None):
        raise ConfigError(f"{name}: true_positives and false_positives: both, or neither")
    return plan


# ---- before ---------------------------------------------------------------------------------


def needed(plan: Plan, effect: float = 1.0) -> int:
    """Requests of each arm that tell the expected rates apart, at the level that Holm's correction
    leaves to the first of the comparisons. `effect`: how much sessions widen the variance."""
    comparisons = len(plan.arms) - 1
    first, second = plan.expect
    level = 1 - (1 - LEVEL) / comparisons
    return ceil(trials_needed(first, second, plan.power, level) * max(effect, 1.0))


def check_size(plan: Plan) -> str:
    """What the plan's size can show. Raise ConfigError where it is too small and does not say so
    (`underpowered = true`)."""
    wanted = needed(plan)
    first, second = (f"{PER * one:g}" for one in plan.expect)
    said = (
        f"{first} and {second} per {PER:,} are told apart with a power of {plan.power:g} by "
        f"{wanted:,} requests an arm (independent ones; sessions want more)"
    )
    if plan.requests >= wanted:
        return f"{said}; there are {plan.requests:,}"
    if plan.underpowered:
        return f"{said}; there are {plan.requests:,}, which the plan calls underpowered itself"
    raise ConfigError(f"{said}; requests is {plan.requests:,}")


def order(plan: Plan) -> list[tuple[int, str]]:
    """(block, arm) in turn: in each block every arm once, shuffled anew."""
    rng = np.random.default_rng(plan.seed)
    names = list(plan.arms)
    turns = []
    for block in range(plan.blocks):
        shuffled = [names[at] for at in rng.permutation(len(names))]
        turns += [(block, name) for name in shuffled]
    return turns


# ---- after ----------------------------------------------------------------------------------


class Told(Struct, frozen=True, kw_only=True):
    """One arm. Intervals are (low, high) of rates; `sessions_interval` is None where no draw of
    sessions differs from another (no events, say). `true` is the rate with the detector's errors
    taken out, and its interval."""

    arm: str
    events: int
    trials: int
    sessions: int
    interval: tuple[float, float]
    sessions_interval: tuple[float, float] | None = None
    true: tuple[float, float, float] | None = None

    @property
    def rate(self) -> Rate:
        return Rate(self.events, self.trials)


class Comparison(Struct, frozen=True, kw_only=True):
    """An arm against the baseline. The p-value that counts is the permutation's, corrected; the
    others are shown beside it."""

    arm: str
    permutation: float
    permutation_holm: float
    fisher: float
    fisher_holm: float


class Ablated(Struct, frozen=True, kw_only=True):
    baseline: str
    event: str
    size: str
    effect: float | None  # by how much sessions widened the baseline's variance
    late: int  # blocks whose generator was late: their load was not the plan's
    arms: tuple[Told, ...]
    comparisons: tuple[Comparison, ...]


def analyse(plan: Plan, arms: Mapping[str, Sessions], done: int, late: int = 0) -> Ablated:
    """The one look. `done`: blocks of all arms together that are complete; `late` of them are not
    valid. Raise ConfigError while one is missing."""
    turns = plan.blocks * len(plan.arms)
    if done < turns or arms.keys() != plan.arms.keys():
        raise ConfigError(
            f"{done} of {turns} blocks are done; results are looked at when all are, since "
            "whoever looks earlier finds differences that are not there"
        )
    arms = _alike(arms)
    base = arms[plan.baseline]
    others = [name for name in plan.arms if name != plan.baseline]
    swapped = [permutation(base, arms[name], seed=plan.seed) for name in others]
    exact = [fisher(base.total, arms[name].total) for name in others]
    return Ablated(
        baseline=plan.baseline,
        event=plan.event,
        size=check_size(plan),
        effect=design_effect(base),
        late=late,
        arms=tuple(_told(plan, name, arms[name]) for name in plan.arms),
        comparisons=tuple(
            Comparison(
                arm=name, permutation=one, permutation_holm=two, fisher=three, fisher_holm=four
            )
            for name, one, two, three, four in zip(
                others, swapped, holm(swapped), exact, holm(exact)
            )
        ),
    )


def _alike(arms: Mapping[str, Sessions]) -> dict[str, Sessions]:
    """Every arm with all sessions: one of which nothing could be judged has no trials there."""
    names = sorted({session for one in arms.values() for session in one.counts})
    return {
        arm: Sessions({name: one.counts.get(name, (0, 0)) for name in names})
        for arm, one in arms.items()
    }


def _told(plan: Plan, name: str, sessions: Sessions) -> Told:
    rate = sessions.total
    return Told(
        arm=name,
        events=rate.events,
        trials=rate.trials,
        sessions=sum(1 for _, trials in sessions.counts.values() if trials),
        interval=_pair(rate.interval()) if rate.trials else (0.0, 1.0),
        sessions_interval=_pair(drawn) if (drawn := bootstrap(sessions, seed=plan.seed)) else None,
        true=_true(plan, rate),
    )


def _true(plan: Plan, rate: Rate) -> tuple[float, float, float] | None:
    if plan.true_positives is None or plan.false_positives is None or not rate.trials:
        return None
    told: Corrected = corrected(
        rate, Rate(*plan.true_positives), Rate(*plan.false_positives), seed=plan.seed
    )
    return told.value, told.bounds.low, told.bounds.high


def _pair(bounds: Interval) -> tuple[float, float]:
    return bounds.low, bounds.high


# ---- Markdown -------------------------------------------------------------------------------


def words(told: Ablated) -> str:
    compared = {one.arm: one for one in told.comparisons}
    head = f"| arm | events | per {PER:,} (exact 95 %) | sessions drawn "
    rows = [head + "| p, sessions swapped | Fisher |", "|---|---|---|---|---|---|"]
    if any(one.true is not None for one in told.arms):
        rows = [rows[0] + " corrected for the detector |", rows[1] + "---|"]
    for one in told.arms:
        cells = [
            one.arm + (" (baseline)" if one.arm == told.baseline else ""),
            f"{one.events:,} of {one.trials:,}",
            _rate(one.rate.value, one.interval),
            _rate(None, one.sessions_interval),
            *_values(compared.get(one.arm)),
        ]
        if one.true is not None:
            cells.append(_rate(one.true[0], one.true[1:]))
        rows.append("| " + " | ".join(cells) + " |")
    notes = [told.size, "p-values are two-sided, against the baseline, with Holm's correction."]
    if told.effect is not None:
        notes.append(f"Sessions widen the baseline's variance {told.effect:.2f}-fold.")
    if told.late:
        notes.append(f"NOT VALID: in {told.late} blocks the generator was late.")
    return "\n".join([*rows, "", *notes])


def _rate(value: float | None, bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return "no draw differs"
    spread = f"{PER * bounds[0]:.1f} to {PER * bounds[1]:.1f}"
    return spread if value is None else f"{PER * value:.1f} ({spread})"


def _values(one: Comparison | None) -> list[str]:
    if one is None:
        return ["", ""]
    return [f"{one.permutation_holm:.4g}", f"{one.fisher_holm:.4g}"]
